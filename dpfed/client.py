"""One client of a deployment: charged on its own disk, noised with numbers that nobody can draw again.

The job is the client's own: its records alone, its own mechanism, and no seed. With a seed whoever knows it could subtract the
noise, and tell which records were drawn, which sampling must keep secret to amplify anything. What comes from the server (the
state, the round with its number, schedule and threshold) may be anything: it decides what is asked, never what it costs.

Only the upload may leave. The memory is the client's own: it is made of what was already private, and holds no noise of its
own. A client that was killed has its last charge and perhaps not the release; it skips that round (`AlreadyChargedError`).
"""

from __future__ import annotations

import math

from dpfed.algorithm import Round, Tree
from dpfed.engines.simulation import Job, train_clients
from dpfed.errors import InputError
from dpfed.forecast import dry_round, planned_events
from dpfed.store import Store


def answer(job: Job, store: Store, run: str, t: Round, s: Tree, memory: Tree = None) -> tuple[Tree, Tree]:
    """The client's upload in round ``t`` of a run, paid for, and its memory until the next one."""
    _refuse_unsound(job, t)
    dry, records = dry_round(job.algorithm, t.num_steps), job.federation
    plan = planned_events(job.mechanism, records.sizes[0], dry, footprint=records.footprint)
    store.charge(run, t.index, plan)
    [upload], kept, [receipt] = train_clients(job, t, s, [0], {} if memory is None else {0: memory})
    if receipt.events != plan:
        raise RuntimeError(f"round {t.index} of run {run!r}: other events were spent than charged; nothing of it is released")
    return upload, kept.get(0)


def _refuse_unsound(job: Job, t: Round) -> None:
    """What no client can vouch for, whoever asks for it."""
    if t.clip is not None and not 0 < t.clip < math.inf:
        raise InputError(f"clip: the server announced {t.clip}, to which nothing can be clipped. Nothing was charged or sent.")
    if job.seed is not None:
        raise InputError(
            f"job.seed: {job.seed} was given, and whoever knows it can draw the noise and the batches again. Set None: a "
            "deployment draws them from a secure generator."
        )
    if (num_clients := len(job.federation.clients)) != 1 or job.factors:
        raise InputError(
            f"job.federation: holds {num_clients} clients. One that answers for itself holds its own records only, and its own "
            "sigma in its mechanism (job.factors empty)."
        )
    if job.mechanism.unit != "example":
        raise InputError(
            f"mechanism.unit: {job.mechanism.unit!r} leaves it to the server to add the noise, and no client can vouch for "
            "that. Use 'example'."
        )
    if job.mechanism.noise != "local":
        raise InputError(
            f"mechanism.noise: {job.mechanism.noise!r} protects only a sum that nobody can take apart, and secure aggregation "
            "is not part of this library. Use 'local'."
        )
