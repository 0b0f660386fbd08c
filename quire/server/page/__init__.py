"""The page: a chat and live pictures of inference, served at `/` unless --no-page."""
