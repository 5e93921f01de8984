//! CPU kernels of the engine (attention over paged KV, matrix products, norms, rotary positions,
//! gating, sampling), and the decoder that is made of them.
//!
//! Architecture invariant: nothing here knows what a request, a block pool or a scheduler is. A
//! kernel gets views of memory and plain indices, checks every index that it will follow, and
//! computes. No environment, no clock, no global state; threads belong to a [`Pool`] that the
//! caller owns.
//!
//! Results do not depend on company: what one token gets is one fixed sequence of floating-point
//! operations, whatever other rows, chunk sizes or number of threads the call has.

#![warn(clippy::undocumented_unsafe_blocks)]
#![allow(
    clippy::inline_always,
    reason = "vector code is compiled to instructions only where it is inlined (see `simd`)"
)]
#![allow(
    clippy::many_single_char_names,
    reason = "the names of mathematics, in expressions that are mathematics"
)]

pub mod attention;
pub mod decoder;
pub mod element;
pub mod error;
pub mod gate;
pub mod isa;
pub mod layout;
mod math;
pub mod norm;
pub mod pool;
pub mod product;
pub mod rope;
pub mod sampling;
mod simd;
mod store;
mod symmetric;
pub mod view;

pub use attention::{Attention, paged_attention};
pub use decoder::{Decoder, KvCache, Layer, Model, Numbers, Step};
pub use element::{Bf16, DType};
pub use error::ArgumentError;
pub use gate::silu_mul;
pub use isa::Isa;
pub use layout::{KvDType, KvLayout, kv_layer_shape, kv_shape};
pub use norm::{Norm, rms_norm};
pub use pool::Pool;
pub use product::{
    Input, Packed, Weight, WeightFormat, decode, encode, gather, linear, linear_silu_mul,
};
pub use rope::{Rope, rope_and_write_kv};
pub use sampling::{
    Assignment, BestToken, Draws, Outputs, RowLogprobs, Sampler, Samples, Score, best_tokens,
    draw_bits, draw_tokens, philox4x32, row_logprobs,
};
pub use view::{KvView, KvViewMut, Matrix, MatrixMut};
