"""Endurance: kits that load, kill and drain a server for minutes or hours, run by hand.

    make endurance                                         all three, with their defaults: about an hour
    make endurance ARGS="faults"                           100 kills, 100 drains, 10,000 aborts: half an hour
    make endurance ARGS="faults --parts drains --drains 10"
    make endurance ARGS="replicas --folder soak"           an hour of several engines that die
    make endurance ARGS="schemas"                          512 JSON schemas, 160 tool calls: some minutes
    make endurance ARGS="soak --minutes 30 --report soak.md"
    make endurance ARGS="soak --help"                      the options, and the promises that are checked

Each starts `quire serve demo` itself, prints a report in Markdown, and ends with status 1 if a promise is
broken. Nothing else should run on the machine. Results are kept in docs/soak.md and docs/faults.md; the code
that judges them is tested by tests/pure/test_load_*.py. Clients and reports come from quire/bench.
"""
