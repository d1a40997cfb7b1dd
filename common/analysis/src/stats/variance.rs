//! Shares of variance per level of a nested design, by the method of moments.

/// Share of the variance of each level, outermost first and the residual last; they add up to 1.
///
/// `groups` gives for each value its group at each level, outermost first, already nested (a group of level 2 belongs to
/// one group of level 1). Components that come out negative count as 0. None if there are fewer than two values, or none
/// of them differs.
pub fn shares(values: &[f64], groups: &[Vec<String>]) -> Option<Vec<f64>> {
    let levels = groups.first()?.len();
    if values.len() < 2 || values.len() != groups.len() || values.iter().any(|v| !v.is_finite()) {
        return None;
    }
    // Keys of depth d: the path of groups down to it. Depth 0 is the whole, depth levels + 1 the single value.
    let key = |i: usize, depth: usize| -> Vec<String> {
        let mut k: Vec<String> = groups[i][..depth.min(levels)].to_vec();
        if depth > levels {
            k.push(i.to_string());
        }
        k
    };
    // Per depth: the number of groups and the sum over groups of size * mean squared.
    let mut counts = Vec::new();
    let mut squares = Vec::new();
    let mut sizes: Vec<Vec<(Vec<String>, f64)>> = Vec::new();
    for depth in 0..=levels + 1 {
        let mut sums: std::collections::BTreeMap<Vec<String>, (f64, f64)> = Default::default();
        for (i, v) in values.iter().enumerate() {
            let e = sums.entry(key(i, depth)).or_default();
            e.0 += v;
            e.1 += 1.0;
        }
        counts.push(sums.len() as f64);
        squares.push(sums.values().map(|(s, n)| s * s / n).sum::<f64>());
        sizes.push(sums.into_iter().map(|(k, (_, n))| (k, n)).collect());
    }
    let total = values.len() as f64;
    // From the inside out: MS(d) = sum of squares between groups of depth d within depth d-1 over its degrees of
    // freedom; its expectation is the sum over deeper levels j of c(d, j) * component(j).
    let coefficient = |d: usize, j: usize| -> f64 {
        // Effective number of values per group of depth j as seen from the contrast between depth d and d - 1.
        let within = |outer: usize| -> f64 {
            sizes[j]
                .iter()
                .map(|(k, n)| {
                    let parent = &k[..outer.min(k.len())];
                    let size = if outer == 0 {
                        total
                    } else {
                        sizes[outer].iter().find(|(p, _)| p.as_slice() == parent).map_or(*n, |(_, n)| *n)
                    };
                    n * n / size
                })
                .sum()
        };
        within(d) - within(d - 1)
    };
    let mut components = vec![0.0; levels + 1];
    for d in (1..=levels + 1).rev() {
        let freedom = counts[d] - counts[d - 1];
        if freedom <= 0.0 {
            continue;
        }
        let between = squares[d] - squares[d - 1];
        let deeper: f64 = (d + 1..=levels + 1).map(|j| coefficient(d, j) * components[j - 1]).sum();
        let own = coefficient(d, d);
        if own > 1e-12 {
            components[d - 1] = ((between - deeper) / own).max(0.0);
        }
    }
    let sum: f64 = components.iter().sum();
    (sum > 0.0).then(|| components.iter().map(|c| c / sum).collect())
}

#[cfg(test)]
mod tests {
    use drums_common::draw::Draw;

    use super::*;

    fn gauss(d: &mut Draw) -> f64 {
        (-2.0 * d.unit().ln()).sqrt() * (std::f64::consts::TAU * d.unit()).cos()
    }

    #[test]
    fn shares_are_found_again() {
        let mut d = Draw::new(3, &["variance"]);
        let (mut values, mut groups) = (Vec::new(), Vec::new());
        for h in 0..40 {
            let host = 2.0 * gauss(&mut d);
            for b in 0..6 {
                let build = gauss(&mut d);
                for _ in 0..4 {
                    values.push(host + build + gauss(&mut d));
                    groups.push(vec![h.to_string(), b.to_string()]);
                }
            }
        }
        let s = shares(&values, &groups).unwrap();
        for (got, want) in s.iter().zip([4.0 / 6.0, 1.0 / 6.0, 1.0 / 6.0]) {
            assert!((got - want).abs() < 0.1, "{s:?}");
        }
    }

    #[test]
    fn nothing_to_share() {
        assert_eq!(shares(&[1.0], &[vec!["a".into()]]), None);
        assert_eq!(shares(&[1.0, 1.0], &[vec!["a".into()], vec!["a".into()]]), None);
        let s = shares(&[1.0, 1.0, 3.0, 3.0], &["a", "a", "b", "b"].map(|g| vec![g.to_owned()])).unwrap();
        assert!((s[0] - 1.0).abs() < 1e-9);
    }
}
