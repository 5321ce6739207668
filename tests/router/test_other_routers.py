"""Routers ask one another in their caller's name, and show what it showed alone."""

from __future__ import annotations

from manylora.v1 import admin_pb2
from manylora_router.admin.service_levels import GET_STATUS
from manylora_router.links.other_routers import OtherRouters
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import RouterRecord
from manylora_shared.errors import Code, RpcError
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
