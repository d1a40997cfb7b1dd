#!/bin/sh
# An external arm in its smallest form: a session is the workload's guest server as a plain process on loopback, with a
# hostname, a machine id and a /tmp of its own and no other isolation. The protocol is in docs/external-arm.md; the folder
# $DRUMS_SESSION_DIR is where a fresh process of this script finds a session again.
set -eu

field() { # LINE KEY: the value of a plain text field
    printf '%s\n' "$1" | sed -n 's/.*"'"$2"'":"\([^"]*\)".*/\1/p'
}

alive() { # PID START: is it still the process that was started?
    [ -r "/proc/$1/stat" ] || return 1
    set -- "$1" "$2" $(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null) || return 1
    # After the name come the state (3) and, 19 fields on, the start time.
    [ "${3:-Z}" != Z ] && [ "${22:-}" = "$2" ]
}

remember() { # PID
    printf '%s %s\n' "$1" "$(sed 's/.*) //' "/proc/$1/stat" | cut -d ' ' -f 20)" >"$DRUMS_SESSION_DIR/guest"
}

create() {
    tree=$(field "$1" tree)
    # A port that follows from the session's number; only one agent measures on a machine at a time.
    number=$(field "$1" session | sed 's/.*-s\([0-9]*\)g.*/\1/')
    port=$((20000 + number % 20000))
    # unshare and the shell replace themselves, so the process that is remembered is the guest server's. Its /etc and
    # /tmp are its own, so that a reset loses what the session wrote there; the program is opened before they hide it.
    env -i PATH="$PATH" DRUMS_HOSTNAME="$(field "$1" hostname)" DRUMS_MACHINE_ID="$(field "$1" machine_id)" \
        DRUMS_PORT="$port" unshare --uts --mount --propagation private \
        sh -c 'exec 3<"$1" && mount -t tmpfs none /etc && mount -t tmpfs none /tmp && exec /proc/self/fd/3 init' \
        sh "$tree/sbin/drums-guest" </dev/null >/dev/null 2>&1 &
    remember $!
    printf '{"ok":true,"address":"127.0.0.1:%s","mechanism":{"isolation":"hostname and machine id"}}\n' "$port"
}

running() {
    [ -r "$DRUMS_SESSION_DIR/guest" ] && alive $(cat "$DRUMS_SESSION_DIR/guest")
}

destroy() {
    if running; then
        kill -9 "$(cut -d ' ' -f 1 "$DRUMS_SESSION_DIR/guest")" 2>/dev/null || :
        while running; do :; done
    fi
    rm -f "$DRUMS_SESSION_DIR/guest"
    printf '{"ok":true}\n'
}

while IFS= read -r line; do
    case $(field "$line" op) in
    create) create "$line" ;;
    facts) printf '{"ok":true,"mechanism":{"program":"plain-process.sh"}}\n' ;;
    destroy) destroy ;;
    observe) if running; then printf '{"ok":true,"present":true}\n'; else printf '{"ok":true,"present":false}\n'; fi ;;
    *) printf '{"ok":false,"error":"this program knows create, facts, destroy and observe"}\n' ;;
    esac
done
