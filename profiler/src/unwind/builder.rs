//! Rules by address, to rows by page.

use hashbrown::HashMap;
use rbprof_common::unwind::MAX_PAGE_ROWS;
use rbprof_common::unwind::PAGE;
use rbprof_common::unwind::Row;
use rbprof_common::unwind::Rule;

use super::Page;
use super::Reason;
use super::Statistics;
use super::Table;

/// Most different rules of one file; real ones have fewer than 800.
const MAX_RULES: usize = 1 << 13;
/// Most rows of one file, of 4 bytes each: what 250 MB of dense text has.
const MAX_ROWS: usize = 1 << 23;
/// The number of [`Rule::UNKNOWN`].
const UNKNOWN: u16 = 0;

/// A table in the making. Addresses must come in ascending order.
pub(super) struct Builder {
    pages: Vec<Page>,
    rows: Vec<Row>,
    rules: Vec<Rule>,
    numbers: HashMap<Rule, u16>,
    /// The rule that holds from the last row on.
    current: u16,
    pub(super) statistics: Statistics,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            pages: Vec::new(),
            rows: Vec::new(),
            rules: vec![Rule::UNKNOWN],
            numbers: HashMap::from([(Rule::UNKNOWN, UNKNOWN)]),
            current: UNKNOWN,
            statistics: Statistics::default(),
        }
    }
}

impl Builder {
    /// Whether there is no room for more functions.
    pub(super) fn is_full(&self) -> bool {
        self.rows.len() >= MAX_ROWS
    }

    /// From `start` to `end`, `rule` holds.
    pub(super) fn put(&mut self, start: u64, end: u64, rule: Rule) {
        let number = self.number(rule);
        if number == UNKNOWN && rule != Rule::UNKNOWN {
            self.statistics.count(Reason::Limit, end - start);
        }
        if !self.set(start, number) {
            self.statistics.count(Reason::Limit, end - start);
        }
    }

    /// From `address` on, nothing is known until the next function.
    pub(super) fn end(&mut self, address: u64) {
        self.set(address, UNKNOWN);
    }

    fn number(&mut self, rule: Rule) -> u16 {
        if let Some(&number) = self.numbers.get(&rule) {
            return number;
        }
        let next = self.rules.len();
        match u16::try_from(next) {
            Ok(number) if next < MAX_RULES => {
                self.rules.push(rule);
                self.numbers.insert(rule, number);
                number
            }
            _ => UNKNOWN,
        }
    }

    /// The rule from `address` on. `false` if its page is full.
    fn set(&mut self, address: u64, rule: u16) -> bool {
        if rule == self.current {
            return true;
        }
        self.begin_pages((address / PAGE) as u32);
        self.current = rule;
        self.push((address % PAGE) as u16, rule)
    }

    /// Begins the page `number`, and those before it that the current rule
    /// reaches into.
    fn begin_pages(&mut self, number: u32) {
        let last = self.pages.last().map(|page| page.number);
        if last == Some(number) {
            return;
        }
        let mut next = number;
        if let Some(last) = last
            && self.current != UNKNOWN
        {
            next = last.saturating_add(1);
        }
        for number in next..=number {
            self.pages.push(Page {
                number,
                first: self.rows.len() as u32,
                count: 0,
            });
            self.push(0, self.current);
        }
    }

    fn push(&mut self, pc: u16, rule: u16) -> bool {
        let Some(page) = self.pages.last_mut() else {
            return false;
        };
        if page.count > 0
            && let Some(last) = self.rows.last_mut()
            && last.pc == pc
        {
            last.rule = rule;
            return true;
        }
        // The last row of a page that is full leaves its rest unknown.
        let is_last = page.count + 1 == MAX_PAGE_ROWS;
        if page.count < MAX_PAGE_ROWS {
            page.count += 1;
            self.rows.push(Row {
                pc,
                rule: if is_last { UNKNOWN } else { rule },
            });
        }
        page.count < MAX_PAGE_ROWS
    }

    pub(super) fn finish(self) -> Table {
        Table {
            pages: self.pages,
            rows: self.rows,
            rules: self.rules,
            statistics: self.statistics,
        }
    }
}
