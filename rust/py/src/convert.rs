//! Python's numbers and arrays as the core's words, with errors that name the argument.

use fastserve_base::{Namespace, Span, Token};
use numpy::{PyReadonlyArray1, PyReadwriteArray1, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::errors;

/// `value` as a number of the core's width, or a refusal that says what is wanted.
pub(crate) fn number<'py, T>(name: &str, value: &Bound<'py, PyAny>, want: &str) -> PyResult<T>
where
    T: FromPyObjectOwned<'py>,
{
    value.extract::<T>().map_err(|error| {
        let (py, error) = (value.py(), error.into());
        if error.is_instance_of::<PyOverflowError>(py) {
            errors::out_of_range(py, name, value, want)
        } else {
            PyTypeError::new_err(format!("{name} must be an int, not {}", kind(value)))
        }
    })
}

/// Token ids: an int32, uint32 or int64 array, or any sequence of ints.
///
/// Ids that do not fit the core's type are refused here; the rest of the range check is the core's.
pub(crate) fn tokens(
    name: &str,
    value: &Bound<'_, PyAny>,
    vocab_size: u32,
) -> PyResult<Vec<Token>> {
    let outside = |position: usize, token: &dyn std::fmt::Display| {
        let text = format!(
            "token id {token} at position {position} is outside the vocabulary of {vocab_size} \
             (0 to {})",
            vocab_size - 1
        );
        errors::refusal(value.py(), &text, "token_out_of_range", 400)
    };
    if let Ok(array) = value.extract::<PyReadonlyArray1<'_, i32>>() {
        let ids = array.as_array();
        return match ids.iter().position(|&id| id < 0) {
            Some(position) => Err(outside(position, &ids[position])),
            None => Ok(ids.iter().map(|&id| id as Token).collect()),
        };
    }
    if let Ok(array) = value.extract::<PyReadonlyArray1<'_, u32>>() {
        return Ok(array.as_array().to_vec());
    }
    if let Ok(array) = value.extract::<PyReadonlyArray1<'_, i64>>() {
        let ids = array.as_array();
        return match ids.iter().position(|&id| Token::try_from(id).is_err()) {
            Some(position) => Err(outside(position, &ids[position])),
            None => Ok(ids.iter().map(|&id| id as Token).collect()),
        };
    }

    let unusable = || {
        PyTypeError::new_err(format!(
            "{name} must be a sequence of ints or a one-dimensional int32, uint32 or int64 array, \
             not {}",
            kind(value)
        ))
    };
    if value.is_instance_of::<PyString>() {
        return Err(unusable());
    }
    let mut ids = Vec::with_capacity(value.len().map_err(|_| unusable())?);
    for (position, item) in value.try_iter().map_err(|_| unusable())?.enumerate() {
        let item = item?;
        ids.push(item.extract::<u32>().map_err(|error| {
            if error.is_instance_of::<PyOverflowError>(value.py()) {
                outside(position, &item)
            } else {
                PyTypeError::new_err(format!(
                    "{name}[{position}] must be an int, not {}",
                    kind(&item)
                ))
            }
        })?);
    }
    Ok(ids)
}

/// A namespace, the common one if it was not given.
pub(crate) fn namespace(value: Option<&Bound<'_, PyAny>>) -> PyResult<Namespace> {
    let read = |value| number("namespace", value, "0 to 2^128 - 1").map(Namespace);
    value.map_or(Ok(Namespace::default()), read)
}

/// Places in another tier: an array or a sequence of ints.
pub(crate) fn places(value: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    value.try_iter()?.map(|place| number("place", &place?, "0 to 2^32 - 1")).collect()
}

/// Spans as `(start, end, digest)` tuples.
pub(crate) fn spans(value: &Bound<'_, PyAny>) -> PyResult<Vec<Span>> {
    value
        .try_iter()?
        .map(|span| {
            let (start, end, digest): (Bound<'_, PyAny>, Bound<'_, PyAny>, Bound<'_, PyAny>) =
                span?.extract().map_err(|_| {
                    PyTypeError::new_err("spans must be (start, end, digest) tuples")
                })?;
            Ok(Span {
                start: number("span start", &start, "0 to 2^32 - 1")?,
                end: number("span end", &end, "0 to 2^32 - 1")?,
                digest: number("span digest", &digest, "0 to 2^128 - 1")?,
            })
        })
        .collect()
}

/// Lend a C-contiguous, writable, one-dimensional int32 array to the core for one call.
pub(crate) fn words_mut<'py>(
    name: &str,
    value: &Bound<'py, PyAny>,
) -> PyResult<PyReadwriteArray1<'py, i32>> {
    match value.extract::<PyReadwriteArray1<'py, i32>>() {
        Ok(array) if array.is_c_contiguous() => Ok(array),
        _ => Err(PyTypeError::new_err(format!(
            "{name} must be a C-contiguous, writable, one-dimensional int32 array that nobody else \
             has borrowed, not {}",
            kind(value)
        ))),
    }
}

/// Lend a C-contiguous, one-dimensional int32 array to the core for one call.
pub(crate) fn words<'py>(
    name: &str,
    value: &Bound<'py, PyAny>,
) -> PyResult<PyReadonlyArray1<'py, i32>> {
    match value.extract::<PyReadonlyArray1<'py, i32>>() {
        Ok(array) if array.is_c_contiguous() => Ok(array),
        _ => Err(PyTypeError::new_err(format!(
            "{name} must be a C-contiguous one-dimensional int32 array, not {}",
            kind(value)
        ))),
    }
}

/// What an argument is, for a message: a type's name, or an array's dtype, shape and flaws.
fn kind(value: &Bound<'_, PyAny>) -> String {
    let Ok(array) = value.cast::<PyUntypedArray>() else {
        return value.get_type().name().map_or_else(|_| "this".to_owned(), |name| name.to_string());
    };
    let writable = value
        .getattr("flags")
        .and_then(|flags| flags.getattr("writeable")?.extract::<bool>())
        .unwrap_or(true);
    let flaws = match (array.is_c_contiguous(), writable) {
        (true, true) => "an",
        (true, false) => "a read-only",
        (false, true) => "a strided",
        (false, false) => "a strided read-only",
    };
    format!("{flaws} array of {} with shape {:?}", array.dtype(), array.shape())
}
