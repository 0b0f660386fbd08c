"""A checkpoint is data: loading it and generating from it runs nothing that it brings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from sources import ROOT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.models import read_model

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
    "auto_map": {"AutoModelForCausalLM": "modeling_trap.Trap", "AutoConfig": "modeling_trap.Trap"},
}
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}"

# A pickle that would write the file it names (protocol 0: call os.system, "posix" being its module here).
TRAP = "cposix\nsystem\n(S'touch {canary}'\ntR."

GENERATE = """
import sys
import guard
guard.install()
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=64)
greedy = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
texts = llm.generate(["once upon", [1, 2, 3]], greedy, use_tqdm=False)
texts += llm.chat([{"role": "user", "content": "hello"}], greedy, use_tqdm=False)
llm.close()
print([len(one.outputs[0].token_ids) for one in texts])
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model next to a pickle and a module that would each leave a file, `canary`."""
    folder = tmp_path_factory.mktemp("checkpoint")
    rng = np.random.default_rng(0)
    weights = {
        str(name): rng.standard_normal(spec.shape).astype(np.float32) * np.float32(0.1)
        for name, spec in read_model(SIZES).program.weights().items()
    }
    save_file(weights, folder / "model.safetensors")
    _write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(SIZES))
    canary = folder / "canary"
    (folder / "pytorch_model.bin").write_text(TRAP.format(canary=canary))
    (folder / "modeling_trap.py").write_text(f"open({str(canary)!r}, 'w').close()\nclass Trap: ...\n")
    return folder


def _write_tokenizer(folder: Path) -> None:
    alphabet = ["<s>", "</s>", "<a>", "<b>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(alphabet[:4])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": "<s>"}))


def _python(code: str, *args: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", code, *args]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests' / 'arch'}{os.pathsep}{ROOT}", "QUIRE_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


@pytest.mark.parametrize("flags", [(), ("-O",)], ids=["plain", "-O"])
def test_a_checkpoint_is_not_run(checkpoint: Path, flags: tuple[str, ...]) -> None:
    run = _python(GENERATE, str(checkpoint), flags=flags)
    assert run.stdout.strip() == "[3, 3, 3]", run.stderr
    assert not (checkpoint / "canary").exists()


@pytest.mark.parametrize(
    "code",
    [
        "import pickle; pickle.load(open(sys.argv[1] + '/pytorch_model.bin', 'rb'))",
        "import marshal; marshal.loads(marshal.dumps(1))",
        "sys.path.insert(0, sys.argv[1]); import modeling_trap",
        "eval('1 + 1')",
        "import jinja2; jinja2.Template('{{ 1 }}').render()",
        "import os; os.system('true')",
    ],
)
def test_the_hook_refuses(checkpoint: Path, code: str) -> None:
    run = _python(f"import sys, guard; guard.install(); {code}", str(checkpoint))
    assert "guard.Refused" in run.stderr, run.stderr
    assert run.returncode == 1
    assert not (checkpoint / "canary").exists()


def test_the_traps_would_go_off(checkpoint: Path) -> None:
    """Without the hook the pickle leaves its file, so that its absence above says something."""
    canary = checkpoint / "canary"
    _python("import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))", str(checkpoint / "pytorch_model.bin"))
    assert canary.exists()
    canary.unlink()
