"""Write a training checkpoint as a Hugging Face model directory.

python -m scripts.demo.export --checkpoint RUN_DIR/checkpoint.pt --tokenizer TOKENIZER.json --out DIR
"""

import argparse
import dataclasses
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from scripts.demo.model import SHAPES, Shape
from scripts.demo.render import END_OF_TEXT, IM_END, TEMPLATE
from scripts.demo.train_tokenizer import SPECIAL

END_OF_TEXT_ID, IM_END_ID = SPECIAL.index(END_OF_TEXT), SPECIAL.index(IM_END)


def model_config(shape: Shape) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **dataclasses.asdict(shape),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": IM_END_ID,
        "pad_token_id": END_OF_TEXT_ID,
    }


GENERATION_CONFIG = {
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": [IM_END_ID, END_OF_TEXT_ID],
    "pad_token_id": END_OF_TEXT_ID,
    "do_sample": True,
    "temperature": 0.5,  # greedy stories repeat their names; hotter ones lose sums and arguments
    "top_p": 0.95,
}


def tokenizer_config(shape: Shape) -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
        "chat_template": TEMPLATE,
    }


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export(checkpoint: Path, tokenizer: Path, out: Path) -> None:
    """Weights become bfloat16 by rounding to nearest; the tied output matrix is stored once."""
    state = torch.load(checkpoint, weights_only=True)
    shape = SHAPES[state["shape"]]
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in state["model"].items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", model_config(shape))
    write_json(out / "generation_config.json", GENERATION_CONFIG)
    write_json(out / "tokenizer_config.json", tokenizer_config(shape))
    shutil.copyfile(tokenizer, out / "tokenizer.json")
    training = {
        "parameters": sum(weight.numel() for weight in weights.values()),
        "tokens_seen": state["tokens"],
        "steps": state["step"],
        "minutes": round(state["elapsed_s"] / 60, 1),
    }
    write_json(checkpoint.with_name("training.json"), training)
    print(json.dumps(training))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    export(args.checkpoint, args.tokenizer, args.out)


if __name__ == "__main__":
    main()
