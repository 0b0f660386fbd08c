"""Environment variables of the processes of a Ray cluster."""

from __future__ import annotations

# What Serve reads in each of its processes: calls go by gRPC instead of the object store, and within the
# event loop that makes them. It takes 5 ms from the time to the first token.
SERVE_ENV = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}
# On a machine that has other work a worker may need minutes to start, where Ray gives up after one, and a
# proxy more than the five seconds after which Serve replaces it.
_OWN_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
}
CLUSTER_ENV = {**SERVE_ENV, **_OWN_ENV}  # of a cluster that ends with its process
