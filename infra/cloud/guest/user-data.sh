#cloud-boothook
#!/bin/sh
d=@DEADLINE_S@ l=@LIFETIME_S@; r=$((d - $(date +%s || echo 0))); [ "$r" -lt "$l" ] || r=$l; [ "$r" -gt 0 ] || r=1; nohup sh -c "sleep $r; poweroff -f & sleep 60; echo o >/proc/sysrq-trigger" >/dev/null 2>&1 & systemd-run --quiet --unit=drums-first-deadline --property=DefaultDependencies=no --timer-property=DefaultDependencies=no --timer-property=AccuracySec=1s --on-active="$r" systemctl poweroff --force >/dev/null 2>&1 &
# The line above, before anything that can fail: this machine is off by its deadline (seconds since 1970), and by the end of
# the lifetime that was registered with its launch, whatever its clock says. A boothook runs early in every boot: before the
# system is up, which a timer would wait for by default, and systemd-run for the timer. So nothing here waits for either.
# What it puts into place outlives it: a boot in which cloud-init does not run, or reaches no metadata, has the units.
umask 077
root=${DRUMS_ROOT:-}
mkdir -p "$root/etc/drums" "$root/usr/local/bin" "$root/usr/local/sbin" "$root/etc/systemd/system"
# Whole or not at all: on a disk that is full, what an earlier boot put there stays.
put() {
    if cat >"$root$1.new" && chmod "$2" "$root$1.new"; then mv -f "$root$1.new" "$root$1"; else rm -f "$root$1.new"; fi
}

put /etc/drums/deadline 600 <<'END_OF_FILE'
DEADLINE_S=@DEADLINE_S@
LIFETIME_S=@LIFETIME_S@
END_OF_FILE
put /usr/local/sbin/drums-deadline 755 <<'END_OF_FILE'
@FILE drums-deadline@
END_OF_FILE
put /etc/systemd/system/drums-deadline.service 644 <<'END_OF_FILE'
@FILE drums-deadline.service@
END_OF_FILE
systemctl daemon-reload
systemctl enable drums-deadline.service
systemctl start --no-block drums-deadline.service

put /etc/drums/agent 600 <<'END_OF_FILE'
AGENT_URL='@AGENT_URL@'
AGENT_SHA256=@AGENT_SHA256@
END_OF_FILE
put /etc/drums/token 600 <<'END_OF_FILE'
@TOKEN@
END_OF_FILE
put /usr/local/sbin/drums-fetch-agent 755 <<'END_OF_FILE'
@FILE drums-fetch-agent@
END_OF_FILE
put /etc/systemd/system/drums-fetch-agent.service 644 <<'END_OF_FILE'
@FILE drums-fetch-agent.service@
END_OF_FILE
put /etc/systemd/system/drums-agent.service 644 <<'END_OF_FILE'
@FILE drums-agent.service@
END_OF_FILE
put /etc/systemd/system/drums-watchdog.service 644 <<'END_OF_FILE'
@FILE drums-watchdog.service@
END_OF_FILE
systemctl daemon-reload
systemctl enable drums-fetch-agent.service drums-watchdog.service drums-agent.service
systemctl start --no-block drums-fetch-agent.service drums-watchdog.service drums-agent.service
