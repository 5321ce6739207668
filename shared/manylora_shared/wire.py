"""What every service's `wire.py` needs between protobuf messages and plain data."""

from __future__ import annotations

from manylora.v1 import common_pb2

from manylora_shared.ids import QosClass

QOS_NUMBERS = {
    QosClass.INTERACTIVE: common_pb2.QOS_CLASS_INTERACTIVE,
    QosClass.STANDARD: common_pb2.QOS_CLASS_STANDARD,
    QosClass.BATCH: common_pb2.QOS_CLASS_BATCH,
}
# without the unset one, and without those of later versions
QOS_CLASSES: dict[int, QosClass] = {int(number): qos_class for qos_class, number in QOS_NUMBERS.items()}
