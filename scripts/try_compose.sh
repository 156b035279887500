#!/usr/bin/env bash
# Builds the images, starts the three services, streams one request from outside, stops them.
# usage: try_compose.sh [--no-build]    needs a running Docker engine; $COMPOSE names another command.
# Run it in an environment that has the client (pip install -e '.[client]').
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${COMPOSE:-}" ]; then
  if docker compose version >/dev/null 2>&1; then COMPOSE="docker compose"; else COMPOSE="docker-compose"; fi
fi
export GAPLESS_PORT=${GAPLESS_PORT:-50051}
server=localhost:$GAPLESS_PORT

finish() {
  code=$?
  trap - EXIT
  if [ $code -ne 0 ]; then $COMPOSE ps || true; $COMPOSE logs --tail=60 || true; fi
  echo "== down"
  $COMPOSE down --volumes --timeout 80
  exit $code
}

if [ "${1:-}" != "--no-build" ]; then
  echo "== build"
  $COMPOSE build
fi
trap finish EXIT
echo "== up"
$COMPOSE up -d
echo "== wait until the gateway serves"
for attempt in $(seq 60); do
  if gapless health --server "$server" >/dev/null 2>&1; then break; fi
  if [ "$attempt" = 60 ]; then echo "not serving after two minutes" >&2; exit 1; fi
  sleep 2
done
echo "== one request from outside"
answer=$(gapless generate --server "$server" --temperature 0 --max-new-tokens 8 "1, 2, 3, 4, 5, 6, 7,")
echo "1, 2, 3, 4, 5, 6, 7,$answer"
case "$answer" in *8*9*) ;; *) echo "unexpected answer" >&2; exit 1 ;; esac
echo "== no service runs as root"
for service in scheduler executor gateway; do
  user=$($COMPOSE exec -T "$service" id -u)
  [ "$user" != 0 ] || { echo "$service runs as root" >&2; exit 1; }
done
