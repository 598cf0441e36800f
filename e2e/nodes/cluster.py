"""Nodes with kubelet and containerd for a control plane, inside the namespaces of `run.sh`.

    etcd ◀─ kube-apiserver ◀─ controller-manager, scheduler
              ▲ bridge                                          addresses: network.py
              ├ n1 ─ containerd, kubelet, kube-proxy ─ pods
              └ n2 ─ … and fakegpu                   ─ pods

Each node has its own network, mount and PID namespace (node.sh). Its image store has
links to the layers of one store that `images.py` fills: nothing writes to a layer once unpacked.
"""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from nodes.network import Family, Network

from vlm_local.client import Access
from vlm_local.controlplane import ControlPlane
from vlm_local.subprocesses import Child, spawn

HERE = Path(__file__).parent
BRIDGE = "nodes0"
MAX_NODES = 9
CNI = next((path for path in map(Path, ("/usr/lib/cni", "/opt/cni/bin")) if path.exists()), None)
NODE_TYPE = "triptych.dev/node-type"
PROXY_USER = "system:kube-proxy"


@dataclasses.dataclass(frozen=True)
class Node:
    """What a node is started with: its type, and how many GPUs it claims to have."""

    index: int
    node_type: str
    gpus: int = 0

    @property
    def name(self) -> str:
        return f"n{self.index}"

    def address(self, family: Family) -> str:
        return family.node.format(self.index)

    def pods(self, family: Family) -> str:
        return family.pods.format(self.index)

    @property
    def labels(self) -> str:
        """As the kubelet's `--node-labels` takes them."""
        gpus = ",nvidia.com/gpu.present=true" if self.gpus else ""  # as GPU feature discovery does
        return f"{NODE_TYPE}={self.node_type}{gpus}"


QUICKSTART = (Node(1, "cpu-large"), Node(2, "gpu-compute", gpus=2), Node(3, "gpu-memory", gpus=2))


class RealNodes:
    """The nodes of one control plane, which was started with the addresses of `network`.

    Args:
        plane: The control plane; may start after this object is made.
        network: Addresses of nodes and pods.
        folder: Of state and logs of nodes; on the file system of `store`.
        programs: The folder of `binaries.find`.
        store: containerd's root with all images.
        update: Called with the containerd client of a node that has started.
    """

    def __init__(
        self,
        plane: ControlPlane,
        network: Network,
        *,
        folder: Path,
        programs: Path,
        store: Path,
        update: Callable[[Callable[..., bytes]], None],
    ) -> None:
        self._plane = plane
        self._network = network
        self._folder = folder
        self._programs = programs
        self._store = store
        self._update = update
        self._children: dict[str, Child] = {}

    def make_bridge(self) -> None:
        """Make the network that joins the nodes."""
        _ip("link", "set", "lo", "up")
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("link", "set", BRIDGE, "up")
        for family in self._network.value:
            _add_address(family.plane, family, BRIDGE)

    def start(self, node: Node) -> None:
        """Start a node; `ready` waits for it."""
        folder = self._folder / node.name
        for name in ("cni", "kubelet", "log", "plugins"):
            (folder / name).mkdir(parents=True)
        _share_store(self._store, folder / "containerd")
        _join(node, self._network)
        self._write_settings(node, folder)
        self._children[node.name] = spawn(
            node.name,
            [
                *("nsenter", f"--net=/run/netns/{node.name}"),
                *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *(HERE / "node.sh", node.name, folder),
                ",".join(node.address(family) for family in self._network.value),
                *(node.labels, str(node.gpus), self._programs),
            ],
            log=folder / "log/node.log",
            environment={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
        )

    def ready(self, node: Node) -> None:
        """Wait until the node is Ready and has its GPUs; update its images."""
        wait = ("wait", f"node/{node.name}", "--timeout=90s")
        self._plane.kubectl(*wait, "--for=create")
        self._plane.kubectl(*wait, "--for=condition=Ready")
        if node.gpus:
            allocatable = r"{.status.allocatable.nvidia\.com/gpu}"
            self._plane.kubectl(*wait, f"--for=jsonpath={allocatable}={node.gpus}")
        self._update(functools.partial(self.ctr, node))

    def ctr(self, node: Node, *arguments: str, stdin: bytes | None = None) -> bytes:
        """Run containerd's client on a node."""
        return ctr(self._folder / node.name / "containerd.sock", *arguments, stdin=stdin)

    def cut(self, name: str) -> None:
        """End a node as a power cut does: all its processes are killed at once."""
        self._children.pop(name).stop(grace_seconds=0)
        _ip("netns", "delete", name)

    def stop(self) -> None:
        """End all nodes."""
        for name in list(self._children):
            self.cut(name)

    def _write_settings(self, node: Node, folder: Path) -> None:
        authority = self._plane.authority()
        user = f"system:node:{node.name}"
        addresses = [node.address(family) for family in self._network.value]
        pair = authority.issue(user, groups=["system:nodes"], addresses=[*addresses, node.name])
        proxy = authority.issue(PROXY_USER)
        for file, shown in (("kubelet", pair), ("proxy", proxy)):
            Access(
                self._plane.server,
                authority.certificate,
                shown.certificate.read_text(),
                shown.key.read_text(),
            ).write(folder / f"{file}.kubeconfig")
        dns = self._network.primary.dns
        (folder / "resolv.conf").write_text(f"nameserver {dns}\n")
        (folder / "containerd.toml").write_text(_containerd(folder))
        for name, text in (
            ("cni/10-bridge.conflist", _cni(node, self._network)),
            (
                "kubelet.json",
                {
                    **_kubelet(node, folder, authority.ca.certificate, pair.certificate, pair.key),
                    "address": addresses[0],
                    "clusterDNS": [dns],
                },
            ),
            ("proxy.json", _proxy(node, folder, self._network)),
        ):
            (folder / name).write_text(json.dumps(text))


def ctr(socket: Path, *arguments: str, stdin: bytes | None = None) -> bytes:
    """Run containerd's client in the namespace that kubelet uses, and return what it prints."""
    command = ["ctr", "-a", str(socket), "-n", "k8s.io", *arguments]
    return subprocess.run(command, input=stdin, stdout=subprocess.PIPE, check=True).stdout


def containerd_settings(root: Path, state: Path, socket: Path, more: str = "") -> str:
    """Return containerd's settings for a store at `root`."""
    off = ["btrfs", "zfs", "aufs", "devmapper"]
    plugins = [f"io.containerd.snapshotter.v1.{name}" for name in off]
    return f"""version = 2
root = "{root}"
state = "{state}"
disabled_plugins = {json.dumps(plugins)}
[grpc]
  address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{root}/opt"
{more}"""


def _containerd(folder: Path) -> str:
    cri = f"""[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/triptych-nodes/pause:1"
  restrict_oom_score_adj = true  # a container may lack CAP_SYS_RESOURCE
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI}"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""
    run = Path("/run/containerd")
    return containerd_settings(folder / "containerd", run, folder / "containerd.sock", cri)


def _cni(node: Node, network: Network) -> Mapping[str, object]:
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": node.pods(family)}] for family in network.value],
        "routes": [{"dst": family.anywhere} for family in network.value],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    plugins = [{**bridge, "ipam": addresses}, ports]
    return {"cniVersion": "1.0.0", "name": "nodes", "plugins": plugins}


def _kubelet(
    node: Node, folder: Path, ca: Path, certificate: Path, key: Path
) -> Mapping[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"x509": {"clientCAFile": str(ca)}},
        "tlsCertFile": str(certificate),
        "tlsPrivateKeyFile": str(key),
        "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/triptych-nodes/{node.name}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDomain": "cluster.local",
        "resolvConf": str(folder / "resolv.conf"),
        "volumePluginDir": str(folder / "plugins"),
        # Nothing can be pulled again, and the disk is the developer's.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
        "systemReserved": {"memory": "1Gi"},  # each node reports the memory of the whole machine
    }


def _proxy(node: Node, folder: Path, network: Network) -> Mapping[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(folder / "proxy.kubeconfig")},
        "hostnameOverride": node.name,
        "mode": "iptables",
        "clusterCIDR": network.all_pods,
        # 0: these settings of the kernel stay as they are
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
    }


def _share_store(store: Path, target: Path) -> None:
    """Copy databases, which containerd writes to; link blobs and unpacked layers."""
    layers = "io.containerd.snapshotter.v1.overlayfs/snapshots"
    for folder in store.glob("*/"):
        ours = target / folder.name
        ours.mkdir(parents=True)
        for database in folder.glob("*.db"):
            shutil.copy2(database, ours)
    content = "io.containerd.content.v1.content"
    shutil.copytree(store / content, target / content, copy_function=os.link, dirs_exist_ok=True)
    (target / layers).mkdir()
    for layer in (store / layers).iterdir():
        (target / layers / layer.name).symlink_to(layer)


def _join(node: Node, network: Network) -> None:
    """Make the node's network namespace, joined to the bridge, with routes to and from its pods."""
    _ip("netns", "add", node.name)
    _ip("link", "add", node.name, "type", "veth", "peer", "name", "eth0", "netns", node.name)
    _ip("link", "set", node.name, "master", BRIDGE, "up")
    inside = ("-n", node.name)
    _ip(*inside, "link", "set", "lo", "up")
    _ip(*inside, "link", "set", "eth0", "up")
    for family in network.value:
        _add_address(node.address(family), family, "eth0", *inside)
        _ip(*inside, "route", "add", "default", "via", family.plane)
        for index in range(1, MAX_NODES + 1):
            if index != node.index:
                other = Node(index, "")
                _ip(*inside, "route", "add", other.pods(family), "via", other.address(family))
        _ip("route", "add", node.pods(family), "via", node.address(family))


def _add_address(address: str, family: Family, device: str, *inside: str) -> None:
    """Add an address that can be used at once: nobody else can have it."""
    now = ("nodad",) if ":" in address else ()
    _ip(*inside, "address", "add", f"{address}/{family.node_bits}", "dev", device, *now)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
