"""protos/: the committed stubs are what it generates, and it keeps the house's rules."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import grpc_tools
import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
GENERATED = ["shared/manylora/v1/*_pb2*.py*", "shared/manylora_shared/coordination/*_pb2*.py*"]

UNITLESS = {"temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logprob"}
UNITLESS |= {"canary_share", "stable_share", "evidence", "limit", "score"}
UNITLESS |= {"kv_byte_seconds", "adapter_byte_seconds", "prefill_flops", "decode_flops"}
UNITLESS |= {"availability", "availability_target", "error_budget", "late_part", "requests_part"}
UNITS = ("_s", "_ms", "_bytes", "_tokens", "_shares")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    """The descriptors of all our protos, comments included."""
    out = tmp_path_factory.mktemp("protos") / "set"
    ours = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "manylora").rglob("*.proto"))
    arguments = [
        "protoc",
        f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
        f"-I{PROTOS}",
        "--include_source_info",
        f"--descriptor_set_out={out}",
        *ours,
    ]
    assert protoc.main(arguments) == 0
    return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def test_stubs_are_generated_from_the_protos(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("generate", PROTOS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    generate.generate(tmp_path)
    for pattern in GENERATED:
        committed = {path.relative_to(ROOT): path.read_text() for path in ROOT.glob(pattern) if path.suffix != ".pyc"}
        fresh = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.glob(pattern)}
        assert committed.keys() == fresh.keys()
        drifted = [str(path) for path in fresh if fresh[path] != committed[path]]
        assert not drifted, f"run `make proto`: {drifted}"


def test_directory_is_package(files: list[FileDescriptorProto]) -> None:
    for file in files:
        assert file.package == str(Path(file.name).parent).replace("/", ".")
        assert file.syntax == "proto3"


def test_services_and_their_messages_are_named_alike(files: list[FileDescriptorProto]) -> None:
    """XxxService; a unary call Yyy has YyyRequest and YyyResponse of its own, a streaming one messages of its own."""
    used: set[str] = set()
    for file in files:
        for service in file.service:
            assert service.name.endswith("Service"), service.name
            for method in service.method:
                ends = {method.input_type, method.output_type}
                assert len(ends) == 2
                assert not ends & used, f"{method.name} shares a message with another call"
                used |= ends
                if not (method.client_streaming and method.server_streaming):
                    names = {end.rpartition(".")[2] for end in ends}
                    assert names == {f"{method.name}Request", f"{method.name}Response"}


def test_enums_begin_with_unspecified(files: list[FileDescriptorProto]) -> None:
    for enum in enums(files):
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
        assert enum.value[0].name == f"{prefix}_UNSPECIFIED"
        assert enum.value[0].number == 0
        assert all(value.name.startswith(prefix + "_") for value in enum.value)


def test_items_of_a_request_stream_are_a_oneof(files: list[FileDescriptorProto]) -> None:
    """Or a list of such, and nothing beside it."""
    by_name = {f".{file.package}.{message.name}": message for file in files for message in file.message_type}
    for file in files:
        for service in file.service:
            for method in service.method:
                if method.client_streaming:
                    item = by_name[method.input_type]
                    if len(item.field) == 1 and item.field[0].label == FieldDescriptorProto.LABEL_REPEATED:
                        item = by_name[item.field[0].type_name]
                    assert item.oneof_decl, method.input_type


def test_fractions_say_their_unit(files: list[FileDescriptorProto]) -> None:
    real = {FieldDescriptorProto.TYPE_DOUBLE, FieldDescriptorProto.TYPE_FLOAT}
    for message in messages(files):
        if message.options.map_entry:
            continue
        for field in message.field:
            if field.type in real and field.name not in UNITLESS:
                assert field.name.endswith(UNITS), f"{message.name}.{field.name}: name its unit"


def test_names_are_snake_case_and_removed_numbers_are_reserved(files: list[FileDescriptorProto]) -> None:
    for message in messages(files):
        numbers = {field.number for field in message.field}
        reserved = {number for span in message.reserved_range for number in range(span.start, span.end)}
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", field.name) for field in message.field)
        if numbers:
            assert numbers | reserved >= set(range(1, max(numbers) + 1)), f"{message.name}: a number was dropped"


def test_files_services_enums_and_streams_are_explained(files: list[FileDescriptorProto]) -> None:
    for file in files:
        comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
        assert comments.get((2,), "").strip(), f"{file.name}: say above `package` what it is for"
        for index, enum in enumerate(file.enum_type):
            assert comments.get((5, index), "").strip(), f"{enum.name}: say what it is"
        for index, service in enumerate(file.service):
            for number, method in enumerate(service.method):
                if method.client_streaming or method.server_streaming:
                    assert comments.get((6, index, 2, number), "").strip(), (
                        f"{method.name}: say what the stream carries"
                    )


def messages(files: list[FileDescriptorProto]) -> Iterator[DescriptorProto]:
    todo = [message for file in files for message in file.message_type]
    while todo:
        message = todo.pop()
        todo += message.nested_type
        yield message


def enums(files: list[FileDescriptorProto]) -> Iterator[EnumDescriptorProto]:
    for file in files:
        yield from file.enum_type
    for message in messages(files):
        yield from message.enum_type
