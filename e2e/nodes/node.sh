#!/usr/bin/env bash
# node.sh NAME FOLDER ADDRESS[,ADDRESS] LABEL GPUS PROGRAMS: the first process of a node, which has its own network, mount
# and PID namespace. If it ends, containerd, kubelet and all containers of the node end with it.
set -euo pipefail
name=$1 folder=$2 address=$3 label=$4 gpus=$5 programs=$6
group=triptych-nodes/$name

# Its own cgroup in each hierarchy. kubelet asks for a cgroupRoot that exists, with all controllers of its pods.
own_cgroup() {  # own_cgroup HIERARCHY
  local parent=$1 part
  for part in triptych-nodes "$name" system; do
    mkdir -p "$parent/$part"
    if [ -e "$parent/cgroup.subtree_control" ]; then  # version 2
      for controller in $(cat "$parent/cgroup.controllers"); do echo "+$controller" >"$parent/cgroup.subtree_control"; done
    elif [ -e "$parent/cpuset.cpus" ]; then
      cat "$parent/cpuset.cpus" >"$parent/$part/cpuset.cpus"
      cat "$parent/cpuset.mems" >"$parent/$part/cpuset.mems"
    fi
    parent=$parent/$part
  done
  echo $$ >"$1/$group/system/cgroup.procs"
}
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then own_cgroup /sys/fs/cgroup; else
  for hierarchy in /sys/fs/cgroup/*/; do
    [ -e "$hierarchy/cgroup.controllers" ] || own_cgroup "${hierarchy%/}"
  done
fi

# Paths that containerd, kubelet and CNI plugins share with the machine otherwise.
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
mkdir -p /run/netns /run/sysctl /var/lib/cni /var/lib/kubelet
mount --bind "$folder/log" /var/log
mount --bind "$folder/kubelet" /var/lib/kubelet
mount --make-shared /var/lib/kubelet
# kubelet writes these for the whole machine: give it copies.
for file in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
  [ -e "/proc/sys/$file" ] || continue
  copy=/run/sysctl/${file##*/}
  cat "/proc/sys/$file" >"$copy"
  mount --bind "$copy" "/proc/sys/$file"
done
echo 1 >/proc/sys/net/ipv4/ip_forward
[ ! -e /proc/sys/net/ipv6 ] || echo 1 >/proc/sys/net/ipv6/conf/all/forwarding

keep() {  # keep NAME COMMAND...: restart what ends, as a service manager does
  local name=$1; shift
  while :; do
    "$@" >>"/var/log/$name.log" 2>&1 || true
    echo "--- $name ended" >>"/var/log/$name.log"
    sleep 1
  done
}
keep containerd containerd --config "$folder/containerd.toml" &
until ctr -a "$folder/containerd.sock" version >/dev/null 2>&1; do sleep 0.1; done
keep kubelet "$programs/kubelet" --config "$folder/kubelet.json" --kubeconfig "$folder/kubelet.kubeconfig" \
  --hostname-override "$name" --node-ip "$address" --node-labels "$label" &
keep kube-proxy "$programs/kube-proxy" --config "$folder/proxy.json" &
[ "$gpus" = 0 ] || keep fakegpu "$programs/fakegpu" -n "$gpus" &
wait
