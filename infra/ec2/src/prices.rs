//! What an hour and a gigabyte cost, by AWS's price list. A price that is not listed, or not once, is unknown.

use aws_sdk_pricing::types::{Filter, FilterType};
use drums_common::clock::Micros;
use drums_provider::{
    cloud::VolumeKind,
    failure::{CloudError, FailureKind},
    money::{Quoted, Source, UsdMicros},
    words::{InstanceType, Region, read_instant},
};
use serde_json::Value;

use crate::{Ec2, failed::failed};

const CALL: &str = "GetProducts";
const SOURCE: &str = "AWS price list (GetProducts)";

impl Ec2 {
    /// Linux, shared tenancy, on demand, nothing installed.
    pub(crate) async fn price_of_hour(
        &self,
        region: &Region,
        kind: &InstanceType,
    ) -> Result<Quoted<UsdMicros>, CloudError> {
        let what = format!("an hour of {kind} in {region}");
        let fields = [
            (
                "productFamily",
                if kind.as_str().contains("metal") { "Compute Instance (bare metal)" } else { "Compute Instance" },
            ),
            ("instanceType", kind.as_str()),
            ("regionCode", region.as_str()),
            ("operatingSystem", "Linux"),
            ("tenancy", "Shared"),
            ("preInstalledSw", "NA"),
            ("capacitystatus", "Used"),
        ];
        self.price(&what, "Hrs", &fields).await
    }

    pub(crate) async fn price_of_volume(
        &self,
        region: &Region,
        kind: VolumeKind,
    ) -> Result<Quoted<UsdMicros>, CloudError> {
        let VolumeKind::Gp3 = kind;
        let what = format!("a GiB-month of gp3 in {region}");
        let fields = [("productFamily", "Storage"), ("volumeApiName", "gp3"), ("regionCode", region.as_str())];
        self.price(&what, "GB-Mo", &fields).await
    }

    async fn price(&self, what: &str, unit: &str, fields: &[(&str, &str)]) -> Result<Quoted<UsdMicros>, CloudError> {
        let filters: Result<Vec<_>, _> = fields
            .iter()
            .map(|(field, value)| Filter::builder().r#type(FilterType::TermMatch).field(*field).value(*value).build())
            .collect();
        let filters = filters.map_err(|e| CloudError::new(FailureKind::Invalid, CALL, e.to_string()))?;
        let request = self.connect.prices().get_products().service_code("AmazonEC2").set_filters(Some(filters));
        let mut pages = request.into_paginator().send();
        let mut listed = Vec::new();
        while let Some(page) = pages.next().await {
            listed.extend(page.map_err(|e| failed(CALL, e))?.price_list().iter().map(|p| read(p, unit)));
        }
        one(what, &listed).map_err(|why| CloudError::new(FailureKind::NotFound, CALL, why))
    }
}

/// The one price among what was listed; why there is none else.
fn one(what: &str, listed: &[Result<Quoted<UsdMicros>, String>]) -> Result<Quoted<UsdMicros>, String> {
    match listed {
        [] => Err(format!("the price of {what} is unknown: none is listed")),
        [Ok(price)] if price.value > UsdMicros(0) => Ok(price.clone()),
        [Ok(_)] => Err(format!("the price of {what} is unknown: it is listed as nothing")),
        [Err(why)] => Err(format!("the price of {what} is unknown: {why}")),
        several => Err(format!("the price of {what} is unknown: {} are listed", several.len())),
    }
}

/// A product's price on demand. The list holds JSON inside strings.
fn read(product: &str, unit: &str) -> Result<Quoted<UsdMicros>, String> {
    let product: Value = serde_json::from_str(product).map_err(|e| format!("it is not JSON: {e}"))?;
    let dimensions: Vec<&Value> = product["terms"]["OnDemand"]
        .as_object()
        .into_iter()
        .flat_map(|terms| terms.values())
        .filter_map(|term| term["priceDimensions"].as_object())
        .flat_map(|dimensions| dimensions.values())
        .collect();
    let [dimension] = dimensions.as_slice() else { return Err(format!("it has {} prices", dimensions.len())) };
    if dimension["unit"] != unit {
        return Err(format!("it is by {} and not by {unit}", dimension["unit"]));
    }
    let text = dimension["pricePerUnit"]["USD"].as_str().ok_or("it is not in dollars")?;
    let value = micros(text).ok_or_else(|| format!("{text} is no amount"))?;
    let date = product["publicationDate"].as_str().and_then(read_instant);
    let as_of: Micros = date.ok_or_else(|| format!("its date is {}", product["publicationDate"]))?;
    Ok(Quoted { value, source: Source::Api(SOURCE.to_owned()), as_of })
}

/// A decimal number of dollars, rounded up to the micro-dollar.
fn micros(text: &str) -> Option<UsdMicros> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if !whole.bytes().chain(fraction.bytes()).all(|b| b.is_ascii_digit()) {
        return None;
    }
    let (counted, rest) = fraction.split_at(fraction.len().min(6));
    let micros: u64 = format!("{counted:0<6}").parse().ok()?;
    let up = u64::from(rest.bytes().any(|b| b != b'0'));
    Some(UsdMicros(whole.parse::<u64>().ok()?.checked_mul(1_000_000)?.checked_add(micros)?.checked_add(up)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(unit: &str, usd: &str) -> String {
        format!(
            r#"{{"publicationDate": "2026-11-01T00:00:00Z", "terms": {{"OnDemand": {{"a": {{"priceDimensions":
            {{"b": {{"unit": "{unit}", "pricePerUnit": {{"USD": "{usd}"}}}}}}}}}}}}}}"#
        )
    }

    #[test]
    fn amounts_are_exact_and_rounded_up() {
        let table =
            [("0.0937000000", 93_700), ("0.00000001", 1), ("3", 3_000_000), ("12.3456789", 12_345_679), ("0", 0)];
        for (text, value) in table {
            assert_eq!(micros(text), Some(UsdMicros(value)), "{text}");
        }
        for bad in ["", "-1", "1e3", "0.1.2", "USD", "99999999999999999999"] {
            assert_eq!(micros(bad), None, "{bad}");
        }
    }

    #[test]
    fn only_one_price_above_nothing_is_known() {
        let hour = |usd| read(&product("Hrs", usd), "Hrs");
        assert_eq!(one("x", &[hour("0.10")]).unwrap().value, UsdMicros(100_000));
        for (listed, why) in [
            (vec![], "none is listed"),
            (vec![hour("0.0000000000")], "listed as nothing"),
            (vec![hour("0.1"), hour("0.1")], "2 are listed"),
            (vec![read(&product("Quantity", "0.1"), "Hrs")], "not by Hrs"),
            (vec![read("{}", "Hrs")], "0 prices"),
            (vec![read("no JSON", "Hrs")], "not JSON"),
        ] {
            let said = one("x", &listed).unwrap_err();
            assert!(said.contains(why) && said.contains("unknown"), "{said}");
        }
    }
}
