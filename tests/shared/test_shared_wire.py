"""Classes of service between protobuf's numbers and ours."""

from __future__ import annotations

from manylora.v1 import common_pb2
from manylora_shared.ids import QosClass
from manylora_shared.wire import QOS_CLASSES, QOS_NUMBERS


def test_every_class_of_the_proto_but_the_unset_one_is_ours_of_the_same_name() -> None:
    numbers = {value.number: value.name for value in common_pb2.QosClass.DESCRIPTOR.values if value.number}
    assert {number: f"QOS_CLASS_{c.value.upper()}" for number, c in QOS_CLASSES.items()} == numbers
    assert set(QOS_NUMBERS) == set(QosClass)
    assert common_pb2.QOS_CLASS_UNSPECIFIED not in QOS_CLASSES
