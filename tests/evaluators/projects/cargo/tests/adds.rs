#[test]
fn adds() { assert_eq!(bill::total(2, 3), 5); }
