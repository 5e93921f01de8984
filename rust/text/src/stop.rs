//! The automaton that finds stop strings in a stream of bytes (Aho and Corasick, 1975).
//!
//! A node stands for a prefix of some stop string. After any input the state is the node of the
//! longest such prefix that the input ends with, so the state's *depth* is exactly the number of
//! bytes that may still become a stop string and must be held back. That number is why the automaton
//! is written here: libraries keep it to themselves.
//!
//! # Cost
//!
//! Nodes are at most the bytes of the stop strings plus one. A node's children are a linked list, at
//! most as long as there are stop strings. One input byte costs amortized O(1) steps.

/// Most stop strings one request may have.
pub const MAX_NUM_STOP_STRINGS: usize = 64;

const ROOT: u32 = 0;
const NONE: u32 = u32::MAX;

/// A list of stop strings that is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// More than [`MAX_NUM_STOP_STRINGS`].
    #[error("{num} stop strings: at most {MAX_NUM_STOP_STRINGS} are taken; shorten the list")]
    TooMany {
        /// How many were given.
        num: usize,
    },
    /// An empty string would stop everything at once.
    #[error(
        "stop string {index} is empty: it would end the output before its first token; leave it out"
    )]
    Empty {
        /// Which of the list.
        index: usize,
    },
}

#[derive(Debug)]
struct Node {
    byte: u8,
    depth: u32,
    first_child: u32,
    next_sibling: u32,
    /// The longest proper suffix that is a node too.
    fail: u32,
    /// The longest stop string that this node's string ends with; of equal ones the first listed.
    pattern: u32,
}

/// Stop strings, ready to be searched for. Shared by the sequences of a request.
#[derive(Debug)]
pub struct StopStrings {
    nodes: Vec<Node>,
    lengths: Vec<usize>,
}

/// Where a search stands. Starts at [`Default`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct State(u32);

impl Default for StopStrings {
    /// No stop strings.
    fn default() -> Self {
        let mut stops = Self { nodes: Vec::new(), lengths: Vec::new() };
        stops.add_node(0, 0);
        stops
    }
}

impl StopStrings {
    /// An automaton for `strings`. An empty list is fine and matches nothing.
    ///
    /// # Errors
    ///
    /// [`StopError`] for too many strings or an empty one.
    pub fn new<S: AsRef<str>>(strings: &[S]) -> Result<Self, StopError> {
        if strings.len() > MAX_NUM_STOP_STRINGS {
            return Err(StopError::TooMany { num: strings.len() });
        }
        if let Some(index) = strings.iter().position(|string| string.as_ref().is_empty()) {
            return Err(StopError::Empty { index });
        }
        let lengths = strings.iter().map(|string| string.as_ref().len()).collect();
        let mut stops = Self { nodes: Vec::new(), lengths };
        stops.add_node(0, 0);
        for (index, string) in strings.iter().enumerate() {
            stops.insert(index as u32, string.as_ref().as_bytes());
        }
        stops.link();
        Ok(stops)
    }

    /// Whether there is nothing to search for.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// The state after one more byte.
    pub(crate) fn next(&self, State(mut node): State, byte: u8) -> State {
        loop {
            let child = self.child(node, byte);
            if child != NONE {
                return State(child);
            }
            if node == ROOT {
                return State(ROOT);
            }
            node = self.nodes[node as usize].fail;
        }
    }

    /// The stop string that ends here and its length: the longest one, and of equals the first listed.
    pub(crate) fn matched(&self, State(node): State) -> Option<(usize, usize)> {
        let index = self.nodes[node as usize].pattern;
        (index != NONE).then(|| (index as usize, self.lengths[index as usize]))
    }

    /// How many of the last bytes may be the beginning of a stop string.
    pub(crate) fn depth(&self, State(node): State) -> usize {
        self.nodes[node as usize].depth as usize
    }

    fn add_node(&mut self, byte: u8, depth: u32) -> u32 {
        let id = self.nodes.len() as u32;
        self.nodes.push(Node {
            byte,
            depth,
            first_child: NONE,
            next_sibling: NONE,
            fail: ROOT,
            pattern: NONE,
        });
        id
    }

    fn child(&self, node: u32, byte: u8) -> u32 {
        let mut child = self.nodes[node as usize].first_child;
        while child != NONE && self.nodes[child as usize].byte != byte {
            child = self.nodes[child as usize].next_sibling;
        }
        child
    }

    fn insert(&mut self, index: u32, string: &[u8]) {
        let mut node = ROOT;
        for (depth, &byte) in (1..).zip(string) {
            let mut child = self.child(node, byte);
            if child == NONE {
                child = self.add_node(byte, depth);
                self.nodes[child as usize].next_sibling = self.nodes[node as usize].first_child;
                self.nodes[node as usize].first_child = child;
            }
            node = child;
        }
        let pattern = &mut self.nodes[node as usize].pattern;
        *pattern = index.min(*pattern); // NONE is the largest: the first listed stays.
    }

    /// Set `fail`, and hand down the pattern of the suffix where a node has none of its own.
    fn link(&mut self) {
        let mut level = vec![ROOT];
        while !level.is_empty() {
            let mut next_level = Vec::new();
            for node in level {
                let mut child = self.nodes[node as usize].first_child;
                while child != NONE {
                    let Node { byte, next_sibling, pattern, .. } = self.nodes[child as usize];
                    if node != ROOT {
                        let State(fail) = self.next(State(self.nodes[node as usize].fail), byte);
                        self.nodes[child as usize].fail = fail;
                        if pattern == NONE {
                            self.nodes[child as usize].pattern = self.nodes[fail as usize].pattern;
                        }
                    }
                    next_level.push(child);
                    child = next_sibling;
                }
            }
            level = next_level;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every match in `text`, as `(end, index)`.
    fn matches(strings: &[&str], text: &str) -> Vec<(usize, usize)> {
        let stops = StopStrings::new(strings).unwrap();
        let mut state = State::default();
        let mut found = Vec::new();
        for (end, byte) in (1..).zip(text.bytes()) {
            state = stops.next(state, byte);
            found.extend(stops.matched(state).map(|(index, _)| (end, index)));
        }
        found
    }

    #[test]
    fn the_textbook_example() {
        // Aho and Corasick's own: "he" and "she" end together, the longer one is named.
        assert_eq!(matches(&["he", "she", "his", "hers"], "ushers"), [(4, 1), (6, 3)]);
    }

    #[test]
    fn a_string_inside_another_ends_first() {
        assert_eq!(matches(&["abcd", "bc"], "abcd"), [(3, 1), (4, 0)]);
    }

    #[test]
    fn of_equal_strings_the_first_listed_is_named() {
        assert_eq!(matches(&["x", "ab", "ab"], "ab"), [(2, 1)]);
    }

    #[test]
    fn depth_is_the_longest_beginning_that_the_text_ends_with() {
        let stops = StopStrings::new(&["aabaac", "ba"]).unwrap();
        let mut state = State::default();
        let depths: Vec<usize> = "aabaaabaaxa"
            .bytes()
            .map(|byte| {
                state = stops.next(state, byte);
                stops.depth(state)
            })
            .collect();
        assert_eq!(depths, [1, 2, 3, 4, 5, 2, 3, 4, 5, 0, 1]);
    }

    #[test]
    fn lists_that_are_not_taken() {
        let many = vec!["a"; 65];
        let errors = [
            StopStrings::new(&many).unwrap_err().to_string(),
            StopStrings::new(&["a", ""]).unwrap_err().to_string(),
        ];
        assert_eq!(
            errors,
            [
                "65 stop strings: at most 64 are taken; shorten the list",
                "stop string 1 is empty: it would end the output before its first token; leave it out",
            ]
        );
        assert!(StopStrings::new(&many[..64]).is_ok());
        assert!(StopStrings::new::<&str>(&[]).unwrap().is_empty());
    }
}
