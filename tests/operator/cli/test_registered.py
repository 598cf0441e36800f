"""Other packages add commands to `vlm` through an entry-point group."""

from importlib.metadata import entry_points

from vlm_local.command import demo


def test_the_local_cluster_registers_the_command_demo():
    found = {item.name: item.load() for item in entry_points(group="vlm.commands")}
    assert found["demo"] is demo
