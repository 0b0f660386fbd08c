"""Counts of the requests of a server as they arrive, begin and end: what a scaler observes."""

from __future__ import annotations

from quire.engine.open_request import OpenRequest
from quire.routing.scaling import Observed


class LoadCounts:
    """Counts of requests and tokens. A request that goes on elsewhere is counted once."""

    def __init__(self) -> None:
        self._num_arrived = self._num_prompt_tokens = 0
        self._num_started = self._num_cached_tokens = 0
        self._num_ended = self._num_output_tokens = 0
        self._queued: dict[
            str, int
        ] = {}  # open requests without a first token, and the tokens of their prompts
        self._begun: set[str] = set()  # other open requests

    def arrived(self, request_id: str, num_prompt_tokens: int) -> None:
        """Note a request that an engine has now."""
        self._queued[request_id] = num_prompt_tokens
        self._num_arrived += 1
        self._num_prompt_tokens += num_prompt_tokens

    def refused(self, num_requests: int, num_prompt_tokens: int) -> None:
        """Note requests that the server refused for its load: more replicas would have taken them.

        Where the length of their prompts is not known (0), they count as of mean length.
        """
        if not num_prompt_tokens and self._num_arrived:
            num_prompt_tokens = num_requests * self._num_prompt_tokens // self._num_arrived
        self._num_arrived += num_requests
        self._num_prompt_tokens += num_prompt_tokens

    def delivered(self, own: OpenRequest, num_cached_tokens: int) -> None:
        """Note an output of a request."""
        request_id = own.request.request_id
        if self._queued.pop(request_id, None) is not None:
            self._begun.add(request_id)
            self._num_started += 1
            self._num_cached_tokens += num_cached_tokens

    def ended(self, own: OpenRequest) -> None:
        """Note the end of a request."""
        request_id = own.request.request_id
        self._queued.pop(request_id, None)
        if request_id in self._begun:
            self._begun.remove(request_id)
            self._num_ended += 1
            self._num_output_tokens += sum(len(one.token_ids) for one in own.sequences)

    def observed(self, at_s: float, num_ready: int, starting_s: tuple[float, ...] = ()) -> Observed:
        """Return the load as a scaler sees it."""
        return Observed(
            at_s,
            num_ready,
            starting_s,
            self._num_arrived,
            self._num_prompt_tokens,
            self._num_started,
            self._num_cached_tokens,
            self._num_ended,
            self._num_output_tokens,
            len(self._queued) + len(self._begun),
            len(self._queued),
            sum(self._queued.values()),
        )
