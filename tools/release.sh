#!/usr/bin/env bash
# release.sh REGISTRY [OUT]: builds, pushes and signs every image and the chart of this checkout, and writes the chart and
# an install.yaml with the images' digests to OUT (default dist/release). REGISTRY is like registry.example.com/me.
# Needs docker with buildx, cosign and helm 3.17 or newer, logged in to the registry. The tag is pyproject.toml's version.
set -euo pipefail
cd "$(dirname "$0")/.."
registry=${1:?usage: release.sh REGISTRY [OUT]} out=${2:-dist/release}
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD)
if [ -n "$(git status --porcelain)" ]; then
  echo "error: the checkout has changes; commit or remove them, so that the revision $revision names what is built"; exit 1
fi
for field in version appVersion; do
  grep -q "^$field: $version\$" helm/triptych/Chart.yaml || {
    echo "error: helm/triptych/Chart.yaml: $field is not $version, the version of pyproject.toml"; exit 1; }
done
if [ -n "${GITHUB_REF_NAME:-}" ] && [ "$GITHUB_REF_NAME" != "v$version" ]; then
  echo "error: the tag is $GITHUB_REF_NAME and pyproject.toml has version $version; tag v$version"; exit 1
fi
rm -rf "$out"; mkdir -p "$out"
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT

image() {  # image NAME PLATFORMS DOCKERFILE [OPTION...]: prints the digest of its index
  local name=$1 platforms=$2 file=$3 digest; shift 3
  docker buildx build --push --platform "$platforms" --provenance=mode=max --sbom=true \
    --build-arg "VERSION=$version" --build-arg "REVISION=$revision" \
    --metadata-file "$work/$name.json" -f "$file" -t "$registry/triptych/$name:$version" "$@" . >&2
  digest=$(sed -n 's/.*"containerimage\.digest": *"\(sha256:[0-9a-f]\{64\}\)".*/\1/p' "$work/$name.json" | head -1)
  [ -n "$digest" ] || { echo "error: docker reported no digest of $name" >&2; exit 1; }
  cosign sign --yes "$registry/triptych/$name@$digest" >&2  # by digest: a tag may move
  echo "$digest"
}

both=linux/amd64,linux/arm64
operator=$(image operator "$both" operator/Dockerfile)
gateway=$(image gateway "$both" worker/Dockerfile --target gateway)
image worker-cpu "$both" worker/Dockerfile --target worker-cpu > /dev/null
worker=$(image worker linux/amd64 worker/Dockerfile --target worker)

# the chart of a release names this registry instead of `localhost`
cp -r helm/triptych "$work/chart"
sed -i "s|^\( *\)registry: localhost$|\1registry: $registry|" "$work/chart/values.yaml"
helm package "$work/chart" --destination "$out" >&2
helm push "$out/triptych-$version.tgz" "oci://$registry/charts" 2>&1 | tee "$work/pushed" >&2
chart=$(sed -n 's/^Digest: *\(sha256:[0-9a-f]\{64\}\)$/\1/p' "$work/pushed")
[ -n "$chart" ] || { echo "error: helm reported no digest of the chart"; exit 1; }
cosign sign --yes "$registry/charts/triptych@$chart"

sed -e "s|localhost/triptych/operator:$version|$registry/triptych/operator@$operator|" \
    -e "s|localhost/triptych/gateway:$version|$registry/triptych/gateway@$gateway|" \
    -e "s|localhost/triptych/worker:$version|$registry/triptych/worker@$worker|" install.yaml > "$out/install.yaml"
! grep -n 'localhost/triptych' "$out/install.yaml" || { echo "error: install.yaml still names local images"; exit 1; }
echo "released $version to $registry"
