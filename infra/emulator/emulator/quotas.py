"""Service Quotas of EC2's virtual CPUs, which moto has not."""

from . import wire

# On-demand standard, spot standard: what an account that has grown a little has.
DEFAULT = {"L-1216C47A": 64.0, "L-34B43A08": 32.0}


class Quotas:
    def __init__(self):
        self.limits = dict(DEFAULT)

    def get(self, call):
        code, service = call.params.get("QuotaCode"), call.params.get("ServiceCode")
        if service != "ec2" or code not in self.limits:
            return wire.error(call, "NoSuchResourceException", f"there is no quota {code} of {service}", 400)
        quota = {
            "ServiceCode": "ec2",
            "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)",
            "QuotaCode": code,
            "QuotaName": "Running instances",
            "Value": self.limits[code],
            "Unit": "None",
            "Adjustable": True,
            "GlobalQuota": False,
        }
        return wire.in_json({"Quota": quota})
