"""Two tenants stream from their own adapters at the same time, through the public client.

Start a cluster, in one terminal:     manylora up --model demo --tenants examples/tenants.yaml
Then, in another:                     python examples/client.py
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from manylora.client import Client, Delta, RequestFailed, Sampling
from manylora.demo import adapter_folder, skills


async def add_adapter(client: Client, tenant: str, name: str) -> None:
    """Uploads a PEFT folder; the same bytes again are the version that they are already."""
    added = await client.adapters.add(tenant, name, adapter_folder(name))
    print(f"{tenant}/{name}@{added.number}: digest {added.version[:12]}, rank {added.max_lora_rank}")


async def stream(client: Client, tenant: str, adapter: str, text: str) -> None:
    """Prints pieces as they arrive: the two tenants' lines are interleaved."""
    async with client.generate(
        skills.prompt(text), tenant=tenant, adapter=adapter, sampling=Sampling(temperature=0.0), timeout_s=30
    ) as events:
        async for event in events:
            if isinstance(event, Delta):
                print(f"{tenant}: {event.text!r}")
        result = events.result()
    print(f"{tenant}: {text!r} -> {result.text!r}, {result.finish_reason}, {result.timings.total_ms:.0f} ms")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:7070")
    parser.add_argument("--key", help="default: MANYLORA_KEY, or the local cluster's operator key")
    arguments = parser.parse_args()
    async with Client(arguments.server, key=arguments.key) as client:
        await add_adapter(client, "acme", "upper")
        await add_adapter(client, "birch", "words")
        await asyncio.gather(
            stream(client, "acme", "upper", "a1b2c3"),
            stream(client, "birch", "words", "a1b2c3"),
        )


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except RequestFailed as error:
        sys.exit(str(error))
