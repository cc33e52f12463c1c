#!/usr/bin/env bash
# Tests the compose file on CPU: builds the images, starts all services, generates from outside, scales, kills
# containers in mid-stream, and cleans up. Takes minutes. The exit status is 0 if all checks pass.
#
# Without a running Docker engine it starts one (needs root and dockerd) and stops it at the end. If no base image can
# be pulled, it makes one from Debian packages (needs debootstrap) and builds from wheels, without an index.
#   BASE_IMAGE  an image with python3 and venv          WHEELS  a directory with all wheels for the images
#   PYTHON      an interpreter that can import specdec; to download wheels it needs the base image's version
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
export PYTHONPATH=$PWD
export COMPOSE_PROJECT_NAME=specdec-test SPECDEC_TAG=test ORCHESTRATOR_PORT=50150-50151
unset COMPOSE_PROFILES COMPOSE_FILE
MODEL_SERVICES=(target draft)
SERVICES=("${MODEL_SERVICES[@]}" orchestrator)
SCALED=(--scale target=2 --scale draft=2 --scale orchestrator=2)
WORK=   # temporary directory
PLACED=() # wheels copied into the build context
ENGINE=   # process id of the engine that was started here
BRIDGE=   # "kept" if the bridge existed before

step() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }
note() { printf '         %s\n' "$*"; }
fail() {
    printf 'test_compose: %s\n' "$*" >&2
    exit 1
}
compose() { docker compose --progress quiet "$@"; }
megabytes() { echo $(($(docker image inspect --format '{{.Size}}' "$1") / 1000000)); }

# --- an engine

start_engine() {
    docker info >/dev/null 2>&1 && return
    [ "$(id -u)" = 0 ] || fail "no Docker engine answers, and only root can start one"
    command -v dockerd >/dev/null || fail "no Docker engine answers, and there is no dockerd (Debian: docker.io)"
    export DOCKER_HOST=unix://$WORK/docker.sock
    if command -v iptables-save >/dev/null; then
        iptables-save --table filter >"$WORK/rules"
    fi
    [ -e /sys/class/net/docker0 ] && BRIDGE=kept
    local options
    # The allowed options depend on the machine. Without iptables, published ports use a proxy.
    for options in --storage-driver=overlay2 --storage-driver=vfs "--storage-driver=overlay2 --iptables=false" \
        "--storage-driver=vfs --iptables=false"; do
        # shellcheck disable=SC2086
        dockerd $options --host="$DOCKER_HOST" --data-root="$WORK/data" --exec-root="$WORK/exec" \
            --pidfile="$WORK/pid" >"$WORK/engine.log" 2>&1 &
        ENGINE=$!
        for _ in {1..60}; do
            docker info >/dev/null 2>&1 && note "dockerd $options" && return
            kill -0 "$ENGINE" 2>/dev/null || break
            sleep 1
        done
        stop_engine
        note "dockerd $options does not run here: $(grep -E 'failed|error' "$WORK/engine.log" | tail -1)"
    done
    fail "no engine could be started"
}

stop_engine() {
    [ -n "$ENGINE" ] || return 0
    kill "$ENGINE" 2>/dev/null || true
    wait "$ENGINE" 2>/dev/null || true
    ENGINE=
    # An engine leaves behind its bridge, its rules, and the FORWARD policy DROP.
    [ -n "$BRIDGE" ] || ip link delete docker0 2>/dev/null || true
    if [ -e "$WORK/rules" ] && ! grep -q DOCKER "$WORK/rules"; then
        iptables-save | grep -vE 'DOCKER|docker0' | iptables-restore
        iptables --policy FORWARD "$(sed -n 's/^:FORWARD \(\w*\).*/\1/p' "$WORK/rules" | grep . || echo ACCEPT)"
    fi
}

# --- the base image and its packages

find_base() {
    if [ -z "${BASE_IMAGE:-}" ] && docker pull --quiet python:3.11-slim-bookworm >"$WORK/pull.log" 2>&1; then
        BASE_IMAGE=python:3.11-slim-bookworm
    elif [ -z "${BASE_IMAGE:-}" ]; then
        note "python:3.11-slim-bookworm cannot be pulled; making a base image from Debian packages"
        BASE_IMAGE=specdec-base:bookworm
        docker image inspect "$BASE_IMAGE" >/dev/null 2>&1 || make_base
        WHEELS=${WHEELS:-$WORK/wheels}
    fi
    export BASE_IMAGE
    note "$BASE_IMAGE, $(megabytes "$BASE_IMAGE") MB"
    [ -n "${WHEELS:-}" ] || return 0
    [ -d "$WHEELS" ] || download_wheels
    export PIP_NO_INDEX=1
    local wheel placed
    for wheel in "$WHEELS"/*.whl; do
        placed=deploy/docker/wheels/${wheel##*/}
        [ -e "$placed" ] && continue
        PLACED+=("$placed")
        cp --link "$wheel" "$placed" 2>/dev/null || cp "$wheel" "$placed"
    done
    note "no index: $(find "$WHEELS" -name '*.whl' | wc -l) wheels"
}

make_base() {
    command -v debootstrap >/dev/null || fail "making a base image needs debootstrap (Debian: debootstrap)"
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$WORK/root" \
        >"$WORK/debootstrap.log" 2>&1 || fail "debootstrap: $(tail -1 "$WORK/debootstrap.log")"
    tar --create --directory "$WORK/root" --exclude='./dev/*' --exclude='./var/cache/apt/*' \
        --exclude='./var/lib/apt/lists/*' --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' \
        --exclude='./usr/share/locale/*' . | docker import - "$BASE_IMAGE" >/dev/null
    rm -rf "$WORK/root"
}

download_wheels() {
    local version='import sys; print("%d.%d" % sys.version_info[:2])' here there
    here=$("$PYTHON" -c "$version")
    there=$(docker run --rm "$BASE_IMAGE" python3 -c "$version")
    [ "$here" = "$there" ] || fail "$PYTHON is version $here and cannot download wheels for $there; set WHEELS"
    "$PYTHON" -m pip download --quiet --constraint constraints.txt --dest "$WHEELS" '.[models,otlp]' 'setuptools>=77' \
        >"$WORK/download.log" 2>&1 || fail "pip download: $(tail -1 "$WORK/download.log")"
}

# --- checks

locked_down() { # SERVICE
    local id status
    id=$(docker compose ps --quiet "$1")
    [ "$(docker exec "$id" id -u)" = 10001 ] || fail "$1 does not run as 10001"
    [ "$(docker inspect --format '{{.HostConfig.ReadonlyRootfs}}' "$id")" = true ] || fail "the root of $1 is writable"
    ! docker exec "$id" touch /app/written 2>/dev/null || fail "$1 can write to /app"
    docker exec "$id" touch /tmp/written || fail "$1 cannot write to /tmp"
    status=$(docker exec "$id" cat /proc/1/status)
    grep -qE '^CapEff:\s0+$' <<<"$status" || fail "$1 has capabilities"
    grep -qE '^NoNewPrivs:\s1$' <<<"$status" || fail "$1 may gain privileges"
}

no_larger() { # SERVICE MEGABYTES, without the base image
    local all own
    all=$(megabytes "specdec-$1:$SPECDEC_TAG")
    own=$((all - $(megabytes "$BASE_IMAGE")))
    note "specdec-$1: $all MB, $own MB without the base image"
    [ "$own" -le "$2" ] || fail "that is more than $2 MB"
}

doctor() { # EXPRESSION over "services" in the output of specdec doctor
    { docker compose exec -T orchestrator specdec doctor --json 2>/dev/null || true; } | # status 1: problems were found
        "$PYTHON" -c "import json, sys; services = json.load(sys.stdin)['services']; print($1)"
}

wait_for_two() {
    local serving
    for _ in {1..30}; do
        serving=$(doctor '*(sum(s["role"] == role and s["serving"] for s in services) for role in ("target", "draft"))') || true
        [ "$serving" = "2 2" ] && return
        sleep 1
    done
    fail "the orchestrator has not found two targets and two drafts, but $serving"
}

lose_busiest() { # SERVICE: kill its container with the most sequences
    local found='0 -' id
    # Retries, because all sequences may be moving between replicas at a given moment.
    for _ in {1..20}; do
        found=$(doctor "*max((s['live_sequences'], s['address'].rpartition(':')[0]) for s in services if s['role'] == '$1')")
        [ "${found% *}" = 0 ] || break
    done
    [ "${found% *}" != 0 ] || fail "no $1 has a sequence to lose"
    for id in $(docker compose ps --quiet "$1"); do
        if docker inspect --format '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}' "$id" |
            grep -qxF "${found#* }"; then
            docker kill "$id" >/dev/null
            note "killed a $1 with ${found% *} of 8 sequences"
            return
        fi
    done
    fail "no container has the address ${found#* }"
}

lose_orchestrator() { # kill the orchestrator at the first address
    docker kill "$(docker ps --quiet --filter "publish=${ORCHESTRATOR_PORT%-*}" \
        --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME")" >/dev/null
    note "killed the orchestrator that the client used"
}

ends_in_order() {
    compose stop
    local id
    for id in $(docker compose ps --all --quiet); do
        case $(docker inspect --format '{{.State.ExitCode}}' "$id") in
        0) ;;
        137) killed=$((killed + 1)) ;;
        *) fail "a container ended with status $(docker inspect --format '{{.State.ExitCode}}: {{.Name}}' "$id")" ;;
        esac
    done
    [ "$killed" = 3 ] || fail "$killed containers were killed, instead of three"
}

tear_down() {
    local status=$?
    trap - EXIT
    step "tearing down"
    if [ "$status" != 0 ]; then
        docker compose logs --tail 20 2>/dev/null || true
    fi
    compose down --volumes --remove-orphans --timeout 5 --rmi all 2>/dev/null || true
    stop_engine
    rm -f "${PLACED[@]}"
    rm -rf "$WORK"
    [ "$status" != 0 ] || step "all checks passed"
    exit "$status"
}

if [ $# -gt 0 ]; then # called by disturbed.py, in the environment of the main run
    "$@"
    exit
fi
WORK=$(mktemp --directory /tmp/specdec-test.XXXXXX)
trap tear_down EXIT

"$PYTHON" -c 'import specdec.client' 2>/dev/null || fail "$PYTHON cannot import specdec (make setup)"
docker compose version >/dev/null 2>&1 || fail "this needs the compose plugin, version 2 (docker compose version)"
step "engine"
start_engine
note "engine $(docker version --format '{{.Server.Version}}'), compose $(docker compose version --short)"
step "base image"
find_base
step "images"
compose build >"$WORK/build.log" 2>&1 || fail "the build failed: $(tail -30 "$WORK/build.log")"
step "up"
compose up --detach --no-build --wait --wait-timeout 300
step "generating from outside"
address=$(docker compose port orchestrator 50050)
"$PYTHON" -m specdec.cli.main generate "def main(" --max-tokens 64 --seed 7 --json --address "$address" |
    "$PYTHON" -c 'import json, sys; answer = json.load(sys.stdin); print("        ", repr(answer["text"][:60]), "...")'
step "non-root, read-only root, no capabilities; sizes"
for service in "${SERVICES[@]}"; do locked_down "$service"; done
! docker compose exec -T orchestrator python -c 'import torch' 2>/dev/null || fail "the orchestrator's image has torch"
no_larger orchestrator 150
for service in "${MODEL_SERVICES[@]}"; do no_larger "$service" 1200; done
step "two of each"
compose up --detach --no-build --wait --wait-timeout 300 "${SCALED[@]}"
wait_for_two
first=127.0.0.1:${ORCHESTRATOR_PORT%-*} second=127.0.0.1:${ORCHESTRATOR_PORT#*-}
step "killing one of each in mid-stream"
export BASE_IMAGE PYTHON
"$PYTHON" deploy/compose/disturbed.py "$first,$second" \
    "deploy/test_compose.sh lose_busiest target" "deploy/test_compose.sh lose_busiest draft" \
    "deploy/test_compose.sh lose_orchestrator"
step "stopping cleanly"
killed=0
ends_in_order
