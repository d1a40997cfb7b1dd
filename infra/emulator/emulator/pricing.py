"""AWS's price list, which moto has not: GetProducts in its real shape, where each product is JSON inside a string."""

import json

from . import wire

# Dollars an hour (Linux, shared tenancy, on demand), and a gigabyte-month of a gp3 volume. Tests change them.
DEFAULT = {
    "us-east-1": {"c8i.large": "0.0937", "c8i.2xlarge": "0.3750", "m7i.large": "0.1008", "gp3": "0.0800"},
    "eu-central-1": {"c8i.large": "0.1066", "c8i.2xlarge": "0.4266", "m7i.large": "0.1207", "gp3": "0.0952"},
}
PAGE = 100


class Pricing:
    def __init__(self):
        self.prices = json.loads(json.dumps(DEFAULT))

    def get_products(self, call):
        service = call.params.get("ServiceCode")
        if service != "AmazonEC2":
            return wire.error(call, "NotFoundException", f"No price list of {service}", 400)
        wanted = {f["Field"]: f["Value"] for f in call.params.get("Filters", []) if f.get("Type") == "TERM_MATCH"}
        found = [
            json.dumps(product)
            for region, prices in self.prices.items()
            for what, price in prices.items()
            if _fits((product := _product(region, what, price)), wanted)
        ]
        start = int(call.params.get("NextToken") or 0)
        size = min(int(call.params.get("MaxResults") or PAGE), PAGE)
        said = {"FormatVersion": "aws_v1", "PriceList": found[start : start + size]}
        if start + size < len(found):
            said["NextToken"] = str(start + size)
        return wire.in_json(said)


def _fits(product, wanted):
    known = product["product"]["attributes"] | {"productFamily": product["product"]["productFamily"]}
    return all(known.get(field, "").lower() == value.lower() for field, value in wanted.items())


def _product(region, what, price):
    instance = "." in what
    sku = f"{region}{what}".upper().replace("-", "").replace(".", "")[:16]
    attributes = {"servicecode": "AmazonEC2", "regionCode": region, "locationType": "AWS Region"}
    if instance:
        attributes |= {
            "instanceType": what,
            "operatingSystem": "Linux",
            "tenancy": "Shared",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
            "marketoption": "OnDemand",
            "licenseModel": "No License required",
            "usagetype": f"BoxUsage:{what}",
            "operation": "RunInstances",
        }
    else:
        attributes |= {"volumeApiName": what, "volumeType": "General Purpose", "usagetype": f"EBS:VolumeUsage.{what}"}
    offer, dimension = f"{sku}.JRTCKXETXF", f"{sku}.JRTCKXETXF.6YS6EN2CT7"
    priced = {
        "unit": "Hrs" if instance else "GB-Mo",
        "beginRange": "0",
        "endRange": "Inf",
        "description": f"${price} per {what}",
        "appliesTo": [],
        "rateCode": dimension,
        "pricePerUnit": {"USD": f"{float(price):.10f}"},
    }
    term = {
        "priceDimensions": {dimension: priced},
        "sku": sku,
        "effectiveDate": "2026-11-01T00:00:00Z",
        "offerTermCode": "JRTCKXETXF",
        "termAttributes": {},
    }
    family = "Compute Instance" if instance else "Storage"
    return {
        "product": {"productFamily": family, "attributes": attributes, "sku": sku},
        "serviceCode": "AmazonEC2",
        "terms": {"OnDemand": {offer: term}},
        "version": "20261101000000",
        "publicationDate": "2026-11-01T00:00:00Z",
    }
