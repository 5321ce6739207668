from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from manylora_shared.process.config import ConfigError, check_bounds, check_listen, help_text, load, parse, setting


@dataclass(frozen=True)
class Config:
    """What the example serves.

    More about it.
    """

    model: str
    listen: str = field(default="127.0.0.1:0", metadata={"help": "where to listen"})
    block_size: int = field(default=16, metadata={"help": "tokens a block"})
    ratio: float = 0.5
    verbose: bool = False
    store: Path = Path("adapters")
    quantization: Literal["none", "nf4"] = "none"
    limit: int = setting(8, "of something", at_least=1)
    share: float = setting(0.5, "of something", above=0)

    def __post_init__(self) -> None:
        check_listen(self.listen)
        check_bounds(self)
        if self.block_size < 1:
            raise ValueError(f"--block-size: {self.block_size} is not positive")


def config(*argv: str, **env: str) -> Config:
    return parse(Config, ["--model=m", *argv], env)


def test_defaults() -> None:
    assert config() == Config(model="m")


def test_every_type_from_flags() -> None:
    assert config(
        *(
            "--listen",
            "127.0.0.1:5",
            "--block-size",
            "32",
            "--ratio=0.25",
            "--verbose",
            "--store=/tmp/x",
        ),
        *("--quantization=nf4", "--limit=7"),
    ) == Config("m", "127.0.0.1:5", 32, 0.25, True, Path("/tmp/x"), "nf4", 7)


def test_whole_numbers_that_no_float_is_near(tmp_path: Path) -> None:
    huge = 10**400
    assert config(f"--limit={huge}").limit == huge
    file = tmp_path / "config.yaml"
    file.write_text(f"ratio: {huge}\n")
    with pytest.raises(ConfigError, match=r"ratio: 1000.* is not a number"):
        config(f"--config={file}")


def test_flag_before_environment_before_file_before_default(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("block_size: 1\nratio: 1\nlimit: 1\nquantization: nf4\n")
    found = config(f"--config={file}", "--block-size=3", MANYLORA_BLOCK_SIZE="2", MANYLORA_RATIO="2")
    assert (found.block_size, found.ratio, found.limit, found.quantization) == (3, 2.0, 1, "nf4")
    assert config(MANYLORA_CONFIG=str(file)).block_size == 1
    assert found.verbose is False


@pytest.mark.parametrize(("word", "value"), [("1", True), ("yes", True), ("ON", True), ("false", False), ("0", False)])
def test_booleans(word: str, value: bool) -> None:
    assert config(MANYLORA_VERBOSE=word).verbose is value
    assert config(f"--verbose={word}").verbose is value


def test_a_flag_turns_off_what_the_environment_turned_on() -> None:
    assert config("--no-verbose", MANYLORA_VERBOSE="true").verbose is False


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--block-sise=3"], "--block-sise: unknown setting; did you mean --block-size?"),
        (["--zzz"], "--zzz: unknown setting; see --help"),
        (["serve"], "'serve': unexpected argument"),
        (["--ratio"], "--ratio: needs a value"),
        (["--no-verbose=1"], "--no-verbose: takes no value"),
        (["--ratio=1", "--ratio=2"], "--ratio: given more than once"),
        (["--block-size=x"], "--block-size: 'x' is not a whole number"),
        (["--block-size=1.5"], "--block-size: '1.5' is not a whole number"),
        (["--ratio=nan"], "--ratio: 'nan' is not a finite number"),
        (["--verbose=maybe"], "--verbose: 'maybe' is not one of true, false"),
        (["--quantization=int8"], "--quantization: 'int8' is not one of none, nf4"),
        (["--limit=0"], "--limit: must be at least 1"),
        (["--share=0"], "--share: must be greater than 0"),
        (["--block-size=0"], "--block-size: 0 is not positive"),
        (["--listen=nowhere"], "--listen: 'nowhere' is not host:port"),
        (["--config=/nowhere.yaml"], "--config: /nowhere.yaml: No such file or directory"),
    ],
)
def test_wrong_settings_are_named(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(*argv)
    assert str(raised.value) == message


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--model \(MANYLORA_MODEL\): must be set"):
        parse(Config, [], {})


def test_unknown_variables_are_refused_where_they_look_misspelt() -> None:
    assert config(MANYLORA_SERVER="x", MANYLORA_ROUTER_PORT_7001_TCP="y", OTHER="z") == Config(model="m")
    with pytest.raises(ConfigError, match="MANYLORA_BLOCKSIZE: unknown setting; did you mean MANYLORA_BLOCK_SIZE"):
        config(MANYLORA_BLOCKSIZE="1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("bloc_size: 1", "bloc_size: unknown setting; did you mean block_size?"),
        ("[1, 2]", "must be a mapping of settings"),
        ("a: [", "is not YAML"),
        ("a: 2020-99-99", "is not YAML"),
        ("a: !!bool 7", "is not YAML"),
        ("a: !!int ''", "is not YAML"),
        ("a: !!timestamp z", "is not YAML"),
        ("- " * 3000, "is not YAML"),
        ("block_size: true", "block_size: True is not a whole number"),
        ("listen: [1]", r"listen: \[1\] is not text"),
        ("verbose: 3", "verbose: 3 is not one of true, false"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        config(f"--config={file}")


def test_a_home_that_nobody_has_is_named() -> None:
    with pytest.raises(ConfigError, match="--store: '~nobody-of-this-name/x': Could not determine home"):
        config("--store=~nobody-of-this-name/x")


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert config(f"--config={tmp_path / 'empty.yaml'}") == Config(model="m")


def test_load_exits_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        load(Config, ["--ratio=x"], {})
    assert raised.value.code == 2
    assert capsys.readouterr().err == "error: --ratio: 'x' is not a number\n"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        load(Config, ["--help"], {})
    assert raised.value.code == 0
    text = capsys.readouterr().out
    assert text == help_text(Config) + "\n"
    assert "What the example serves." in text
    assert "--block-size INT" in text
    assert "tokens a block [default 16]" in text
    assert "--verbose, --no-verbose" in text
    assert "--quantization none|nf4" in text
    assert "[required]" in text


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--model=m"], Config(model="m")),
        (
            ["--model=a b", "--listen=0.0.0.0:1", "--block-size=8", "--ratio=1e-09", "--verbose", "--store=/x y",
             "--quantization=nf4", "--limit=3"],
            Config("a b", "0.0.0.0:1", 8, 1e-9, True, Path("/x y"), "nf4", 3),
        ),
        (["--model=", "--store=--x"], Config("", store=Path("--x"))),
    ],
)  # fmt: skip
def test_flags_of_every_type(argv: list[str], expected: Config) -> None:
    assert parse(Config, argv, {}) == expected


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "0.0.0.0:0", "router:7001"])
def test_addresses_to_listen_on(address: str) -> None:
    check_listen(address)


@pytest.mark.parametrize("address", ["", "7001", ":7001", "router:", "router:x", "router:65536", "router:-1"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="--listen"):
        check_listen(address)
