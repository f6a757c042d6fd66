//! The order in which those that are measured take turns.

/// The places of so many that take turns, in the order of this run (from 1): from the first to the last, and in the
/// next run from the last to the first. So whoever comes second in one pair comes first in the next, and what the one
/// before leaves behind (caches, memory, a warm processor) is left to both alike.
pub(crate) fn turns(count: usize, run: u32) -> Vec<usize> {
    let forward = 0..count;
    if run.is_multiple_of(2) { forward.rev().collect() } else { forward.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_a_turn_and_the_first_is_the_last_of_the_next_run() {
        assert_eq!(turns(3, 1), [0, 1, 2]);
        assert_eq!(turns(3, 2), [2, 1, 0]);
        assert_eq!(turns(2, 3), [0, 1]);
        assert_eq!(turns(0, 1), [0; 0]);
    }
}
