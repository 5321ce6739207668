"""Routers ask one another in their caller's name, and show what it showed alone."""

from __future__ import annotations

from manylora.v1 import admin_pb2
from manylora_router.admin.service_levels import GET_STATUS
from manylora_router.links.other_routers import OtherRouters
from manylora_shared.coordination import keys
from manylora_shared.coordination.peers import PeerSecret, PeerTransport
from manylora_shared.coordination.records import RouterRecord
from manylora_shared.errors import Code, RpcError
from manylora_shared.tenancy.identity import new_key
from manylora_sim.peers import SIMULATED
from router_fakes import RouterCluster, simulate, until


def test_each_other_router_answers_or_says_why_not() -> None:
    async def test(cluster: RouterCluster) -> None:
        key = await cluster.put_key(tenant="acme")
        await cluster.store.put(keys.router("router-9"), RouterRecord("router-9", "nowhere:1").to_json())
        await until(lambda: len(cluster.app.directory.routers) == 2 and len(cluster.app.directory.api_keys) == 2)
        network = cluster.network.transport("asks")
        asks = OtherRouters(router_id="asks", directory=cluster.app.directory, transport=network)
        request = admin_pb2.GetStatusRequest(local_only=True)
        heard = await asks.ask(GET_STATUS, request, {"authorization": f"Bearer {key}", "cookie": "secret"})
        assert isinstance(heard["router-0"], admin_pb2.GetStatusResponse)
        assert isinstance(heard["router-9"], RpcError)
        refused = (await asks.ask(GET_STATUS, request, {}))["router-0"]
        assert refused.code is Code.UNAUTHENTICATED

    simulate(test)


def test_a_keys_networks_are_its_callers_also_where_a_router_asks_for_it() -> None:
    """A score that another router had to be asked for ended with 503: the key was not for that router's host."""

    async def test(cluster: RouterCluster) -> None:
        made = new_key(
            cluster.key_rng.getrandbits,
            tenant_id="acme",
            scopes=["generate"],
            name="",
            now_unix_s=1.0,
            networks=["10.0.0.0/8"],
        )
        await cluster.put_key_record(made.record)
        await until(lambda: len(cluster.app.directory.api_keys) == 2)
        request = admin_pb2.GetStatusRequest(local_only=True)

        async def asked(host: str, secret: dict[str, str]) -> Code:
            metadata = {"x-manylora-caller": host, **secret}
            try:
                await cluster.caller(made.key).call(GET_STATUS, request, metadata=metadata)
            except RpcError as e:
                return e.code
            return Code.OK

        router, stranger = SIMULATED.metadata(), PeerSecret("x" * 32).metadata()
        assert await asked("10.1.2.3", router) is Code.OK
        assert await asked("11.1.2.3", router) is Code.PERMISSION_DENIED
        assert await asked("10.1.2.3", stranger) is Code.PERMISSION_DENIED
        assert await asked("10.1.2.3", {}) is Code.PERMISSION_DENIED
        peers = PeerTransport(cluster.network.transport("asks"), SIMULATED)
        asks = OtherRouters(router_id="asks", directory=cluster.app.directory, transport=peers)
        shown = {"authorization": f"Bearer {made.key}", "x-manylora-caller": "10.1.2.3"}
        assert isinstance((await asks.ask(GET_STATUS, request, shown))["router-0"], admin_pb2.GetStatusResponse)

    simulate(test)
