"""What a job on several machines has besides: membership, and keepers that know each other."""

from __future__ import annotations

import logging
from typing import Final

from outlast import config
from outlast.errors import ConfigError, StorageError
from outlast.keeper import wire
from outlast.keeper.process import Supervisor
from outlast.launch.arguments import Launch
from outlast.launch.membership import Membership
from outlast.launch.membership.handler import own_address, place_of
from outlast.launch.membership.messages import Go
from outlast.ledger.file import read_events
from outlast.ledger.job import Job
from outlast.ledger.narrator import say
from outlast.peer.tls import Tls
from outlast.policy.membership import Rules

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S: Final = 1800.0  # that machines wait for enough others


def membership(launch: Launch, settings: config.Settings, job: Job) -> Membership:
    """This machine's membership, as the command line and the settings ask for it.

    Raises:
        ConfigError, StorageError: an address or the storage cannot be used.
    """
    conf = launch.config
    if (tls := Tls.of(settings)) is not None:
        tls.client()  # files that cannot be used are said before anything is started
    try:
        wait_s = float(conf.rdzv_configs.get("join_timeout", JOIN_TIMEOUT_S))
    except ValueError:
        wait_s = 0.0
    if not wait_s > 0:
        raise ConfigError("--rdzv-conf join_timeout is not a number of seconds above 0")
    return Membership(
        place_of(conf.rdzv_endpoint or str(settings.dir)),
        Rules(min_nodes=conf.min_nodes, max_nodes=conf.max_nodes),
        run_id=job.id,
        host=conf.local_addr or own_address(),
        silence_s=settings.membership_silence_s,
        attempt=max((event.attempt for event in read_events(settings.dir)), default=0),
        workers=conf.nproc_per_node,
        labels=settings.membership_labels,
        timeout_s=wait_s,
        say=say,
    )


def introduce(member: Membership, keeper: Supervisor, settings: config.Settings) -> None:
    """Let this machine's keeper talk to the others' keepers, in each attempt.

    One that cannot costs the replicas, and nothing else.

    Raises:
        ConfigError: the files for TLS are not all named.
    """
    try:
        host, port = keeper.serve(
            member.host, member.key, node=member.me.node, tls=Tls.of(settings)
        )
    except StorageError as error:
        say(f"no snapshots are kept for other machines: {error}")
        return
    member.announce_keeper(host, port)

    def tell(go: Go) -> None:
        members = [
            wire.Member(node=one.node, host=one.keeper[0], port=one.keeper[1], labels=one.labels)
            for one in go.members
            if one.keeper is not None
        ]
        if not keeper.tell_members(go.attempt, members):
            logger.warning("the keeper has not heard of attempt %d in time", go.attempt)

    member.on_attempt = tell
