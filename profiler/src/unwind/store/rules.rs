//! Numbers of rules, shared by all files.

use hashbrown::HashMap;
use rbprof_common::unwind::Rule;

use super::Maps;

/// Which number each rule has. Rules are small, and files have mostly the same
/// ones, so they stay for good.
#[derive(Debug)]
pub(super) struct Rules {
    numbers: HashMap<Rule, u16>,
    capacity: u32,
}

impl Rules {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            numbers: HashMap::from([(Rule::UNKNOWN, 0)]),
            capacity,
        }
    }

    /// The numbers of these rules; that of [`Rule::UNKNOWN`] where there is no
    /// room for more.
    pub(super) fn numbers<M: Maps>(
        &mut self,
        rules: &[Rule],
        maps: &mut M,
    ) -> Result<Vec<u16>, M::Error> {
        rules
            .iter()
            .map(|rule| {
                if let Some(&number) = self.numbers.get(rule) {
                    return Ok(number);
                }
                let next = self.numbers.len();
                let Some(number) = u16::try_from(next)
                    .ok()
                    .filter(|number| u32::from(*number) < self.capacity)
                else {
                    return Ok(0);
                };
                maps.set_rule(number, rule)?;
                self.numbers.insert(*rule, number);
                Ok(number)
            })
            .collect()
    }
}
