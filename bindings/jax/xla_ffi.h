/*
 * The part of XLA's FFI, a C ABI of major version 0, that a handler of host buffers uses. jaxlib ships the ABI's full
 * description as xla/ffi/api/c_api.h. Structures grow only at their ends, and begin with the size that their writer
 * knows.
 */
#ifndef PACELINE_XLA_FFI_H
#define PACELINE_XLA_FFI_H

#include <stddef.h>
#include <stdint.h>

enum { XLA_EXTENSION_METADATA = 1 };
enum { XLA_STAGE_EXECUTE = 3 };
enum { XLA_INVALID_ARGUMENT = 3, XLA_RESOURCE_EXHAUSTED = 8, XLA_INTERNAL = 13 };
enum { XLA_ATTRIBUTE_ARRAY = 1, XLA_ATTRIBUTE_STRING = 4 };

/* The newest minor version that this file has been tested with. Futures exist since 1, the oldest that is used. */
enum { XLA_MINOR_TESTED = 3 };

typedef struct xla_error xla_error;
typedef struct xla_future xla_future;

typedef struct xla_extension {
  size_t size;
  int type;
  struct xla_extension *next;
} xla_extension;

typedef struct xla_version {
  size_t size;
  xla_extension *extensions;
  int major, minor;
} xla_version;

typedef struct xla_error_create {
  size_t size;
  xla_extension *extensions;
  const char *message;
  int code;
} xla_error_create;

typedef struct xla_future_call { /* create, set available, and with the error set error */
  size_t size;
  xla_extension *extensions;
  xla_future *future;
  xla_error *error;
} xla_future_call;

typedef struct xla_api {
  size_t size;
  xla_extension *extensions;
  xla_version version;
  const void *internal;
  xla_error *(*error_create)(xla_error_create *);
  void (*unused[12])(void); /* messages of errors, registration, streams, state, device memory, threads */
  xla_error *(*future_create)(xla_future_call *);
  xla_error *(*future_set_available)(xla_future_call *);
  xla_error *(*future_set_error)(xla_future_call *);
} xla_api;

typedef struct xla_buffer {
  size_t size;
  xla_extension *extensions;
  int dtype;
  void *data;
  int64_t rank;
  int64_t *dims;
} xla_buffer;

typedef struct xla_span { /* not ended by a NUL */
  const char *text;
  size_t length;
} xla_span;

typedef struct xla_array {
  int dtype;
  size_t count;
  void *data;
} xla_array;

typedef struct xla_buffers {
  size_t size;
  xla_extension *extensions;
  int64_t count;
  int *types;
  xla_buffer **buffers;
} xla_buffers;

typedef struct xla_attributes { /* sorted by name */
  size_t size;
  xla_extension *extensions;
  int64_t count;
  int *types;
  xla_span **names;
  void **values;
} xla_attributes;

typedef struct xla_call {
  size_t size;
  xla_extension *extensions;
  const xla_api *api;
  void *context;
  int stage;
  xla_buffers inputs;
  xla_buffers outputs;
  xla_attributes attributes;
  xla_future *future; /* set by an asynchronous handler */
} xla_call;

typedef struct xla_metadata {
  size_t size;
  xla_version version;
  uint32_t traits;
  int64_t state_type; /* later versions */
} xla_metadata;

typedef struct xla_metadata_extension {
  xla_extension base;
  xla_metadata *metadata;
} xla_metadata_extension;

#endif
