"""Every timer of the data plane, as one value.

    renew < lease          up to three lost renewals do not end a lease
    wait_frame < no_progress    distinguishes a producer without units from a lost one
    ping + ping_timeout    detect a frozen or vanished peer, whether or not bytes move

`scaled` multiplies all of them, so that a fault test at a tenth of the times is equivalent. Gateway
and workers of a service use the same scale, because each expects the other's pings in time.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Self


@dataclasses.dataclass(frozen=True, slots=True)
class Timers:
    """Timers in seconds.

    Attributes:
        lease: time for which a producer holds KV or an embedding after the last renewal.
        reservation: time for which a decode worker holds a reservation after the last renewal.
        renew: interval of renewals, from the time when the consumer queues the request.
        sweep: interval of sweeps for expired leases.
        no_progress: time without a frame after which a consumer considers its producer lost. A
            reader that takes no frame for this time no longer keeps its lease alive.
        wait_frame: interval of keepalive frames from a producer that has no units.
        quarantine: time for which memory that a peer may still read is kept after its request.
        ping: interval of pings on an idle connection.
        ping_timeout: time without an answer after which a connection is dead.
        connect: time limit for opening a data connection; after it, the fetch uses gRPC.
        control: deadline of a call that is answered at once: Hello, Reserve, Cancel, renewals.
        cancel: deadline of a Cancel for a client that has left.
        idle_connection: time without a request after which a data connection is closed.
        reserved: maximum age of a reservation, however often it is renewed. It exceeds an Encode,
            the only stage between a reservation and its Decode.
        held: maximum time for which KV or an embedding is offered, however often its lease is
            renewed. It exceeds an Encode, a Prefill and a fetch together.
        fetch: deadline of one transfer.
        encode: deadline of an Encode.
        prefill: deadline of a Prefill.
        decode: deadline of a Decode.
        last_words: time in which requests can end after the drain deadline has failed them.
        load: interval of a worker's load reports.
        silence: time without a load report after which a gateway considers a worker lost.
        hello: deadline of a new worker's Hello reply to a gateway.
        retry, max_retry: first and maximum wait between a gateway's attempts to reach a worker;
            the wait doubles.
        heartbeat: interval of comments on a stream that waits for a pod.
        scale: the factor by which all of these were multiplied.
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
    scale: float = 1.0

    @property
    def frozen(self) -> float:
        """Seconds within which a frozen peer is detected."""
        return self.ping + self.ping_timeout

    def scaled(self, scale: float) -> Self:
        fields = {f.name: getattr(self, f.name) * scale for f in dataclasses.fields(self)}
        return dataclasses.replace(self, **fields)


PRODUCTION: Final = Timers()
"""The timers if `--timer-scale` is not given."""
