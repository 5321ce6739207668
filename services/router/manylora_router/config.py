"""The router's settings. Parsed once, in `__main__`; never changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from manylora_shared.dialects import ReasoningParser, ToolParser
from manylora_shared.encryption.settings import SealingSettings
from manylora_shared.ids import name_problem
from manylora_shared.process.config import ConfigError, check_listen, setting


@dataclass(frozen=True, kw_only=True)
class RouterConfig(SealingSettings):
    """Router: the public face of a manylora cluster."""

    adapter_store: str = field(
        metadata={"help": "the adapter store, shared with the workers: a folder, or s3://BUCKET/PREFIX"}
    )
    adapter_store_access: str = setting(
        "", "YAML file with endpoint, region and credentials of a store in a bucket; empty: AWS_* of the environment"
    )
    adapter_sources: str = setting(
        "",
        "YAML file of the places that tenants may name as sources of adapters; empty: operators' keys alone name any",
    )
    router_id: str = setting("", "this router's name; empty: one is drawn")
    model: str = setting("", "base model's folder or cached hub id, for its tokenizer; empty: token ids only")
    pool_models: str = setting(
        "", "base models of further pools, for their tokenizers: POOL=FOLDER_OR_ID, several with commas"
    )
    generation_config: Literal["auto", "none"] = setting(
        "auto",
        "sampling where a request sets none; auto: that of the model's generation_config.json",
    )
    tool_parser: ToolParser = setting(  # noqa: RUF009 - an immutable type, by its alias
        "auto", "how answers call tools; auto: by the model's chat template"
    )
    reasoning_parser: ReasoningParser = setting(  # noqa: RUF009
        "auto", "how answers set reasoning apart; auto: by the model's chat template"
    )
    default_max_tokens: int = setting(128, "output tokens of a request that names no limit", at_least=1)
    max_adapter_mb: int = setting(4096, "largest weight file that an adapter may have, in MiB", at_least=1)
    retention_mb: int = setting(
        256, "MiB of kept prompts and answers that a tenant may have in the adapter store", at_least=1
    )
    http_listen: str = setting("", "host:port of the OpenAI HTTP API; port 0: any free one; empty: none")
    console: bool = setting(True, "pages for operators and tenants at /console of the HTTP API's address")
    drain_s: float = setting(5.0, "how long running requests may go on after a SIGTERM", at_least=0)
    operator_key_file: str = setting("", "file with an operator's key, made where there is none; empty: none")
    audit_log: str = setting("", "folder of the audit log; empty: none is kept")
    audit_key_file: str = setting(
        "", "file with the key that signs the audit log, made where there is none; empty: audit.key beside the folder"
    )
    ledger: str = setting(
        "",
        "where usage is kept: sqlite:FILE, of the routers of one machine; parquet:FOLDER, which routers share; "
        "postgresql:env:NAME, :file:PATH or :vault:PATH#FIELD, where the connection string is; empty: nowhere",
    )
    ledger_via: str = setting(
        "",
        "what brings rows there: nats:env:NAME, nats:file:PATH or nats:vault:PATH#FIELD, where JetStream's URL is, and "
        "`manylora usage forward` at its other end; empty: this router does",
    )
    ledger_log: str = setting(
        "", "folder of the ledger's log on this machine; empty: `ledger-log` beside the file or folder"
    )
    ledger_max_mb: int = setting(1024, "most that the log may take while rows cannot be kept, in MiB", at_least=32)
    ledger_when_full: Literal["refuse", "count"] = setting(
        "refuse", "requests for whose rows there is no room: refuse them, or serve them and count the lost rows"
    )
    prices: str = setting("", "YAML file of the price list; empty: rows have no price")
    token_issuers: str = setting("", "YAML file of the issuers whose JSON web tokens are taken; empty: keys alone")

    @property
    def models_of_pools(self) -> dict[str, str]:
        """By pool."""
        parts = [part.strip().partition("=") for part in self.pool_models.split(",") if part.strip()]
        wrong = next((name for name, _, model in parts if not model), None)
        if wrong is not None:
            raise ConfigError(f"--pool-models: {wrong!r} names no model: POOL=FOLDER_OR_ID is expected")
        return {name.strip(): model.strip() for name, _, model in parts}

    @property
    def has_exposition(self) -> bool:
        return super().has_exposition or bool(self.http_listen)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.http_listen:
            check_listen(self.http_listen, "--http-listen")
            self.check_tls(self.http_listen, "--http-listen")
        for pool in self.models_of_pools:
            if problem := name_problem(pool):
                raise ConfigError(f"--pool-models: {pool!r} {problem}")
        if not self.adapter_store:
            raise ConfigError("--adapter-store: must name a folder or a bucket")
