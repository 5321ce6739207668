from __future__ import annotations

import sys
from pathlib import Path

import manylora_shared.ledger_sinks
import pytest
from ledger_sinks import rows_of
from manylora_shared.ledger.usage import Query
from manylora_shared.ledger_sinks.opening import log_folder, open_sink


def test_a_setting_names_a_sink(tmp_path: Path) -> None:
    sink = open_sink(f"sqlite:{tmp_path}/usage.sqlite")
    assert sink.sums(Query(), ()) == []
    assert (tmp_path / "usage.sqlite").exists()
    assert log_folder(f"sqlite:{tmp_path}/usage.sqlite") == tmp_path / "ledger-log"
    for place in ("sqlite:", "usage.sqlite", "oracle:x"):
        with pytest.raises(ValueError, match="is not sqlite:FILE"):
            open_sink(place)


def test_parquet_files_lie_in_a_folder(tmp_path: Path) -> None:
    sink = open_sink(f"parquet:{tmp_path}/usage")
    sink.put(rows_of(2))
    assert list((tmp_path / "usage").glob("day=*/*.parquet"))
    assert log_folder(f"parquet:{tmp_path}/usage") == tmp_path / "ledger-log"


def test_a_connection_string_is_named_and_never_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "postgresql://manylora:5ecret@db/usage"
    (tmp_path / "dsn").write_text(secret + "\n")
    monkeypatch.setenv("LEDGER_DSN", secret)
    monkeypatch.setenv("NO_DSN", "host 5ecret")
    for place in (f"postgresql:file:{tmp_path}/dsn", "postgresql:env:LEDGER_DSN"):
        open_sink(place).close()
        assert log_folder(place) is None
    for place, told in (
        (secret, "never on a command line"),
        ("mysql://root:5ecret@db", "is not sqlite:FILE"),
        ("postgresql:env:NOT_THERE", "there is nothing in env:NOT_THERE"),
        ("postgresql:env:NO_DSN", "no connection string"),
    ):
        with pytest.raises(ValueError, match=told) as wrong:
            open_sink(place)
        assert "5ecret" not in str(wrong.value)


@pytest.mark.parametrize(
    ("place", "module", "extra"),
    [
        ("parquet:usage", "pyarrow", "parquet"),
        ("postgresql:env:LEDGER_DSN", "psycopg", "postgresql"),
        ("sqlite:usage.sqlite", "nats", "nats"),
    ],
)
def test_a_package_that_is_missing_is_named(
    place: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("manylora_shared.parquet.", f"{module}."))]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("postgres", "jetstream"):
        monkeypatch.delitem(sys.modules, f"manylora_shared.ledger_sinks.{name}", raising=False)
        monkeypatch.delattr(manylora_shared.ledger_sinks, name, raising=False)
    monkeypatch.setenv("NATS_URL", "nats://host")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"needs {module}(-py)?: pip install 'manylora\[{extra}\]'"):
        open_sink(place, "nats:env:NATS_URL" if module == "nats" else "")
