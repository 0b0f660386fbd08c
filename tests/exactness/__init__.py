"""Exactness of speculation: the same tokens and log-probability bits with drafts as without.

    make exact                                   10,000 random requests: some minutes
    make exact ARGS="--requests 500 --seed 7"
    make exact ARGS="--only 3141"                one round of these again

A *round* draws a model, a few requests, and engines of different settings. One engine runs the requests
without drafts, the others with drafts of every kind, good and bad; all outputs must be equal, bit for bit.
`asked.py` draws requests, `engines.py` models and settings, `guesses.py` drafts. `broken.py` has
verifications that are wrong on purpose: rounds must notice each. The suite runs some rounds
(test_speculation.py in tests/model, test_native_speculation.py in tests/native).
"""
