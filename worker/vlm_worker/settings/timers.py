"""How long anybody waits for anybody: every timer of the data plane, as one value.

    renew < lease          a lost renewal or three do not end a lease
    wait_frame < no_progress    a producer that has nothing yet is told from one that is gone
    ping + ping_timeout    a frozen or vanished peer is noticed, whether or not bytes move

`scaled` shortens all of them alike, so that a fault test of a tenth is the same test. Gateway and
workers of one service run at the same scale: each takes the other's pings for what they are.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Self


@dataclasses.dataclass(frozen=True, slots=True)
class Timers:
    """Seconds, all of them.

    Attributes:
        lease: a producer holds KV or an embedding so long after the last renewal.
        reservation: likewise, a decode worker its room.
        renew: between two renewals, from the moment the consumer queues the request.
        sweep: between two looks at what has expired.
        no_progress: without a frame for so long, a consumer takes its producer for lost; a reader
            that takes no frame for so long no longer keeps its lease alive.
        wait_frame: a producer without units says so often that it lives.
        quarantine: what a peer may still read is kept so long after its request ended.
        ping: between two pings of an idle connection.
        ping_timeout: without an answer for so long, the connection is dead.
        connect: a data connection is made within so long, or the fetch goes over gRPC.
        control: deadline of a call that is answered at once: Hello, Reserve, Cancel, renewals.
        cancel: deadline of a Cancel on behalf of a client that has left.
        idle_connection: a data connection over which nothing was asked for so long is closed.
        reserved: a reservation ends after so long, however often it is renewed; longer than an
            Encode, as nothing else comes before its Decode.
        held: KV or an embedding is offered no longer, however often its lease is renewed; longer
            than an Encode, a Prefill and a fetch together.
        fetch: deadline of one transfer.
        encode: deadline of an Encode.
        prefill: deadline of a Prefill.
        decode: deadline of a Decode.
        last_words: what is left at the drain deadline is told so, and has so long to end.
        load: between two load reports of a worker.
        silence: a gateway that gets no report for so long takes the worker for lost.
        hello: a worker that a gateway finds has so long to say who it is.
        retry, max_retry: between two attempts of a gateway to reach a worker, doubling.
        heartbeat: between two comments on a stream that waits for a pod to come back.
    """

    lease: float = 10.0
    reservation: float = 10.0
    renew: float = 2.0
    sweep: float = 0.5
    no_progress: float = 8.0
    wait_frame: float = 2.0
    quarantine: float = 60.0
    ping: float = 10.0
    ping_timeout: float = 5.0
    connect: float = 1.0
    control: float = 5.0
    cancel: float = 1.0
    idle_connection: float = 60.0
    reserved: float = 240.0
    held: float = 1500.0
    fetch: float = 600.0
    encode: float = 180.0
    prefill: float = 600.0
    decode: float = 3600.0
    last_words: float = 2.0
    load: float = 1.0
    silence: float = 10.0
    hello: float = 2.0
    retry: float = 0.2
    max_retry: float = 2.0
    heartbeat: float = 1.0

    @property
    def frozen(self) -> float:
        """A peer that stands still is noticed within so long."""
        return self.ping + self.ping_timeout

    def scaled(self, scale: float) -> Self:
        """All timers times `scale`."""
        fields = {f.name: getattr(self, f.name) * scale for f in dataclasses.fields(self)}
        return dataclasses.replace(self, **fields)


PRODUCTION: Final = Timers()
"""As they are wherever `--timer-scale` is not given."""
