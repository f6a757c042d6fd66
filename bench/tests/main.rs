//! The tables, measured for real on little memory.
#![allow(clippy::unwrap_used)]
mod converge;
mod quick;

use std::path::Path;

use serde_json::Value;

/// What a table has written, whose rows say what bounds them.
fn report(json: &Path) -> Value {
    let report: Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    for row in report["rows"].as_array().unwrap() {
        let mut limits = row["limits"].as_array().unwrap().iter();
        assert!(limits.any(|limit| limit["value"].as_f64().is_some_and(|value| value > 0.0)), "{row}");
    }
    report
}
