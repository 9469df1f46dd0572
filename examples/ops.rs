//! The router's choice for one row of logits, from Rust, with declarations written by hand.
//!
//!     rustc --edition 2021 ops.rs -L PREFIX/lib && LD_LIBRARY_PATH=PREFIX/lib ./ops
//!
//! A crate declares everything with bindgen instead, and finds the library with the crate pkg-config: docs/linking.md.
//!
//! SPDX-License-Identifier: Apache-2.0
use std::ffi::{c_char, c_void, CStr};

/// Fields in the order of epmoe.h. Zeroed, with `struct_size` set, it is what EPMOE_TOPK_ARGS_INIT makes.
#[repr(C)]
struct TopkArgs {
    struct_size: usize,
    backend: i32, // C enums of epmoe are 32 bits wide
    num_tokens: i32,
    num_experts: i32,
    top_k: i32,
    logits_dtype: i32,
    logits: *const c_void,
    logits_stride: i64,
    selection_bias: *const f32,
    scoring: i32,
    renormalize: i32,
    scale: f32,
    n_group: i32,
    topk_group: i32,
    group_score: i32,
    ids: *mut i32,
    weights: *mut f32,
    num_tokens_dev: *const i32,
}

const BACKEND_CPU: i32 = 1;
const SCORING_SOFTMAX: i32 = 0;

#[link(name = "epmoe")]
extern "C" {
    fn epmoe_topk(args: *const TopkArgs, stream: *mut c_void) -> i32;
    fn epmoe_last_error() -> *const c_char;
    fn epmoe_version() -> i32;
}

/// The message is this thread's and lives until its next failing call: copy it at once.
fn check(status: i32) -> Result<(), String> {
    if status == 0 {
        return Ok(());
    }
    Err(unsafe { CStr::from_ptr(epmoe_last_error()) }.to_string_lossy().into_owned())
}

/// The k best experts of each row of `logits`, softmax over all and renormalised over the k.
fn topk(logits: &[f32], num_experts: usize, k: usize) -> Result<(Vec<i32>, Vec<f32>), String> {
    let num_tokens = logits.len() / num_experts;
    let (mut ids, mut weights) = (vec![0; num_tokens * k], vec![0.0; num_tokens * k]);
    let mut args: TopkArgs = unsafe { std::mem::zeroed() };
    args.struct_size = std::mem::size_of::<TopkArgs>();
    args.backend = BACKEND_CPU;
    args.num_tokens = num_tokens as i32;
    args.num_experts = num_experts as i32;
    args.top_k = k as i32;
    args.logits = logits.as_ptr().cast();
    args.scoring = SCORING_SOFTMAX;
    args.renormalize = 1;
    args.ids = ids.as_mut_ptr();
    args.weights = weights.as_mut_ptr();
    check(unsafe { epmoe_topk(&args, std::ptr::null_mut()) })?;
    Ok((ids, weights))
}

fn main() -> Result<(), String> {
    // Probabilities 0.1, 0.2, 0.3, 0.4: the best two are experts 3 and 2, renormalised to 4/7 and 3/7.
    let (ids, weights) = topk(&[0.0, 2f32.ln(), 3f32.ln(), 4f32.ln()], 4, 2)?;
    let ok = ids == [3, 2] && (weights[0] - 4.0 / 7.0).abs() < 1e-6 && (weights[1] - 3.0 / 7.0).abs() < 1e-6;
    let refused = topk(&[0.0; 4], 4, 5).unwrap_err(); // k above E
    println!("epmoe {}: experts {ids:?} with {weights:?}; refused: {refused}", unsafe { epmoe_version() });
    if ok && refused.contains("top_k") { Ok(()) } else { Err("WRONG".into()) }
}
