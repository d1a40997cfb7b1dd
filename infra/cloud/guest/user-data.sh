#cloud-boothook
#!/bin/sh
d=@DEADLINE_S@ l=@LIFETIME_S@; r=$((d - $(date +%s))); [ "$r" -lt "$l" ] || r=$l; [ "$r" -gt 0 ] || r=1; nohup sh -c "sleep $r; poweroff -f" >/dev/null 2>&1 & systemd-run --quiet --unit=drums-first-deadline --property=DefaultDependencies=no --timer-property=DefaultDependencies=no --timer-property=AccuracySec=1s --on-active="$r" systemctl poweroff --force >/dev/null 2>&1 &
# The line above, before anything that can fail: this machine is off by its deadline (seconds since 1970), and by the end of
# the lifetime that was registered with its launch, whatever its clock says. A boothook runs early in every boot: before the
# system is up, which a timer would wait for by default, and systemd-run for the timer. So nothing here waits for either.
umask 077
mkdir -p /etc/drums /usr/local/bin /usr/local/sbin

cat >/etc/drums/deadline <<'END_OF_FILE'
DEADLINE_S=@DEADLINE_S@
LIFETIME_S=@LIFETIME_S@
END_OF_FILE
cat >/usr/local/sbin/drums-deadline <<'END_OF_FILE'
@FILE drums-deadline@
END_OF_FILE
cat >/etc/systemd/system/drums-deadline.service <<'END_OF_FILE'
@FILE drums-deadline.service@
END_OF_FILE
chmod 755 /usr/local/sbin/drums-deadline
systemctl daemon-reload
systemctl enable drums-deadline.service
systemctl start --no-block drums-deadline.service

cat >/etc/drums/agent <<'END_OF_FILE'
AGENT_URL='@AGENT_URL@'
AGENT_SHA256=@AGENT_SHA256@
END_OF_FILE
cat >/etc/drums/token <<'END_OF_FILE'
@TOKEN@
END_OF_FILE
cat >/usr/local/sbin/drums-fetch-agent <<'END_OF_FILE'
@FILE drums-fetch-agent@
END_OF_FILE
cat >/etc/systemd/system/drums-fetch-agent.service <<'END_OF_FILE'
@FILE drums-fetch-agent.service@
END_OF_FILE
cat >/etc/systemd/system/drums-agent.service <<'END_OF_FILE'
@FILE drums-agent.service@
END_OF_FILE
chmod 755 /usr/local/sbin/drums-fetch-agent
systemctl daemon-reload
systemctl enable drums-fetch-agent.service drums-agent.service
systemctl start --no-block drums-fetch-agent.service drums-agent.service
