/*
 * The operations as TensorFlow knows them, registered when it opens the glue.
 *
 * PacelineExchange has outputs of its inputs' shapes (allreduce, broadcast), into the input's memory where
 * nobody else uses it. PacelineGather has outputs of other lengths (allgather, reducescatter), PacelineAlltoall also
 * the rows from each rank. PacelineChange sends changes that gates may withhold (allreduce) and those of values that
 * the servers hold (accumulate); it has inputs of its own before the tensors, FLAGS. Attributes: `numbers` as in
 * kernel.h, `label` the name without which operations match by their order, of PacelineChange a line for each tensor,
 * `codec` and `sync` of the tensors.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "function.h"
#include "kernel.h"
#include "tf.h"

#define EXPORT __attribute__((visibility("default")))

#define DEFINE(result, name, arguments) result(*name) arguments;
TF_FUNCTIONS(DEFINE)
TF_ASYNC_FUNCTIONS(DEFINE)

static char load_error[256]; /* why the operations are not registered */
static bool async;

/* Why the operations could not be registered, "" if they are. */
EXPORT const char *pl_tensorflow_load_error(void) { return load_error; }

/* Whether operations leave TensorFlow's threads while they wait for other ranks. */
EXPORT int pl_tensorflow_async(void) { return async; }

static char *string_of(TF_Construction *ctx, const char *attribute, TF_Status *status) {
  int32_t list, length = 0;
  TF_OpKernelConstruction_GetAttrSize(ctx, attribute, &list, &length, status);
  char *text = calloc(1, (length > 0 ? (size_t)length : 0) + 1);
  if (TF_GetCode(status) == TF_OK && length > 0)
    TF_OpKernelConstruction_GetAttrString(ctx, attribute, text, (size_t)length, status);
  return text;
}

static void *created(TF_Construction *ctx, int flags) {
  kernel *k = calloc(1, sizeof *k);
  TF_Status *status = TF_NewStatus();
  TF_OpKernelConstruction_GetAttrInt64List(ctx, "numbers", k->numbers, NUMBERS, status);
  k->label = string_of(ctx, "label", status);
  k->codec = string_of(ctx, "codec", status);
  k->sync = string_of(ctx, "sync", status);
  k->flags = flags;
  if (TF_GetCode(status) != TF_OK) TF_OpKernelConstruction_Failure(ctx, status);
  TF_DeleteStatus(status);
  return k;
}

static void *create(TF_Construction *ctx) { return created(ctx, 0); }

static void *create_change(TF_Construction *ctx) { return created(ctx, FLAGS); }

static void destroy(void *k) {
  free(((kernel *)k)->label);
  free(((kernel *)k)->codec);
  free(((kernel *)k)->sync);
  free(k);
}

static void shapes_after(TF_Inference *ctx, int flags, TF_Status *status) {
  TF_Shape *shape = TF_NewShapeHandle();
  int64_t count = TF_ShapeInferenceContextNumInputs(ctx);
  for (int i = flags; i < count && TF_GetCode(status) == TF_OK; i++) {
    TF_ShapeInferenceContextGetInput(ctx, i, shape, status);
    if (TF_GetCode(status) == TF_OK) TF_ShapeInferenceContextSetOutput(ctx, i - flags, shape, status);
  }
  TF_DeleteShapeHandle(shape);
}

static void same_shapes(TF_Inference *ctx, TF_Status *status) { shapes_after(ctx, 0, status); }

static void changed_shapes(TF_Inference *ctx, TF_Status *status) { shapes_after(ctx, FLAGS, status); }

static void other_shapes(TF_Inference *ctx, TF_Status *status) { TF_ShapeInferenceContextSetUnknownShape(ctx, status); }

static bool registered(const char *op, const char *const *inputs, const char *const *outputs, const char *type,
                       void (*shapes)(TF_Inference *, TF_Status *), TF_Create create) {
  TF_Status *status = TF_NewStatus();
  TF_Definition *definition = TF_NewOpDefinitionBuilder(op);
  TF_OpDefinitionBuilderAddAttr(definition, type);
  TF_OpDefinitionBuilderAddAttr(definition, "numbers: list(int)");
  TF_OpDefinitionBuilderAddAttr(definition, "label: string = ''");
  TF_OpDefinitionBuilderAddAttr(definition, "codec: string = ''");
  TF_OpDefinitionBuilderAddAttr(definition, "sync: string = ''");
  for (; *inputs; inputs++) TF_OpDefinitionBuilderAddInput(definition, *inputs);
  for (; *outputs; outputs++) TF_OpDefinitionBuilderAddOutput(definition, *outputs);
  TF_OpDefinitionBuilderSetIsStateful(definition, true); /* never folded, merged or left out: ranks keep in step */
  TF_OpDefinitionBuilderSetShapeInferenceFunction(definition, shapes);
  TF_RegisterOpDefinition(definition, status);
  if (TF_GetCode(status) == TF_OK) {
    TF_Kernel *k = async ? TF_NewAsyncKernelBuilder(op, "CPU", create, compute_async, destroy)
                         : TF_NewKernelBuilder(op, "CPU", create, compute, destroy);
    TF_RegisterKernelBuilder(op, k, status);
  }
  bool ok = TF_GetCode(status) == TF_OK;
  if (!ok) snprintf(load_error, sizeof load_error, "%s: %s", op, TF_Message(status));
  TF_DeleteStatus(status);
  return ok;
}

/* Runs when TensorFlow opens the glue, and expects the operations to be registered meanwhile. */
__attribute__((constructor)) static void load(void) {
  void *framework = dlopen("libtensorflow_framework.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (!framework) {
    snprintf(load_error, sizeof load_error, "libtensorflow_framework.so.2 is not loaded");
    return;
  }
#define LOOK_UP(result, name, arguments) name = (result(*) arguments)dlsym(framework, #name);
#define REQUIRE(result, name, arguments)                                                                     \
  if (!name && !load_error[0]) snprintf(load_error, sizeof load_error, "the function %s is missing", #name);
  TF_FUNCTIONS(LOOK_UP)
  TF_ASYNC_FUNCTIONS(LOOK_UP)
  TF_FUNCTIONS(REQUIRE)
  if (load_error[0]) return;
  const char *wait = getenv("PACELINE_TENSORFLOW_SYNC");
  async = !(wait && wait[0] && strcmp(wait, "0") != 0) && TF_NewAsyncKernelBuilder && TF_RunAsyncOpKernelDoneCallback &&
          function_layout_known(TF_RunAsyncOpKernelDoneCallback);
  const char *tensors[] = {"tensors: T", NULL}, *results[] = {"results: T", NULL};
  const char *changes[] = {"empty: uint8", "significance: float", "within: bool", "tensors: T", NULL};
  const char *parts[] = {"tensor: T", "splits: int64", NULL}, *received[] = {"result: T", "received: int64", NULL};
  (void)(registered("PacelineExchange", tensors, results, "T: list(type)", same_shapes, create) &&
         registered("PacelineChange", changes, results, "T: list(type)", changed_shapes, create_change) &&
         registered("PacelineGather", tensors, results, "T: list(type)", other_shapes, create) &&
         registered("PacelineAlltoall", parts, received, "T: type", other_shapes, create));
}
