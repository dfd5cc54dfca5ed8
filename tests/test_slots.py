from emulator.hardware import FLAVORS
from emulator.slots import Slots


def test_cpu_places():
    slots = Slots(cpu_jobs=2)
    assert slots.take("a", FLAVORS["cpu-basic"]) == ()
    assert slots.take("b", FLAVORS["h200"]) == ()  # no devices: on the CPU
    assert slots.take("c", FLAVORS["cpu-basic"]) is None
    slots.release("a")
    slots.release("a")
    assert slots.take("c", FLAVORS["cpu-basic"]) == ()


def test_devices_are_not_shared_unless_named_twice():
    slots = Slots(cpu_jobs=1, devices="0123")
    assert slots.take("a", FLAVORS["h200x2"]) == ("0", "1")
    assert slots.take("b", FLAVORS["h200"]) == ("2",)
    assert slots.take("c", FLAVORS["h200x2"]) is None
    assert slots.take("d", FLAVORS["cpu-basic"]) == ()
    slots.release("a")
    assert slots.take("c", FLAVORS["h200x2"]) == ("0", "1")
    assert "8 GPUs" in slots.impossible(FLAVORS["h200x8"])
    assert slots.impossible(FLAVORS["h200x4"]) is None


def test_places_on_one_device_are_taken_in_the_order_given():
    slots = Slots(cpu_jobs=1, devices="110")
    assert [slots.take(job, FLAVORS["h200"]) for job in "abcd"] == [("1",), ("1",), ("0",), None]
    slots.release("b")
    assert slots.take("d", FLAVORS["h200"]) == ("1",)


def test_the_devices_of_one_job_differ():
    slots = Slots(cpu_jobs=1, devices="0011")
    assert slots.take("a", FLAVORS["h200x2"]) == ("0", "1")
    assert slots.take("b", FLAVORS["h200"]) == ("0",)
    assert slots.take("c", FLAVORS["h200x2"]) is None
    assert "machine has 2" in slots.impossible(FLAVORS["h200x4"])
