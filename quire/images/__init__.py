"""Images in prompts: how a model's processor cuts them into patches, and how files become pixels."""
