"""CloudWatch's metrics and alarms over rpc-v2-cbor, which is what today's SDKs send and moto does not read."""

from . import wire


class Metrics:
    def __init__(self, clock):
        self.clock = clock
        self.data = []
        self.alarms = {}

    def answer(self, call):
        act = {
            "PutMetricData": self._put_data,
            "ListMetrics": self._list,
            "PutMetricAlarm": self._put_alarm,
            "DescribeAlarms": self._describe,
            "DeleteAlarms": self._delete,
        }.get(call.action)
        if act is None:
            return wire.error(call, "InvalidAction", f"the emulator's CloudWatch has no {call.action}", 400)
        return wire.in_cbor(200, act(call.region, call.params))

    def _put_data(self, region, params):
        for datum in params["MetricData"]:
            self.data.append({"at": self.clock.now(), "region": region, "Namespace": params["Namespace"]} | datum)
        return {}

    def _list(self, region, params):
        named = {
            (d["Namespace"], d["MetricName"], tuple((x["Name"], x["Value"]) for x in d.get("Dimensions", [])))
            for d in self.data
            if d["region"] == region and params.get("Namespace") in (None, d["Namespace"])
        }
        shown = [
            {"Namespace": n, "MetricName": m, "Dimensions": [{"Name": k, "Value": v} for k, v in dimensions]}
            for n, m, dimensions in sorted(named)
        ]
        return {"Metrics": shown}

    def _put_alarm(self, region, params):
        # As in CloudWatch, where no alarm knows anything when it is made.
        self.alarms[region, params["AlarmName"]] = params | {"StateValue": "INSUFFICIENT_DATA"}
        return {}

    def _describe(self, region, params):
        names = params.get("AlarmNames")
        return {"MetricAlarms": [a for (r, n), a in self.alarms.items() if r == region and (not names or n in names)]}

    def _delete(self, region, params):
        for name in params["AlarmNames"]:
            self.alarms.pop((region, name), None)
        return {}
