/*
 * The part of TensorFlow's C interface that the glue calls. Its functions are looked up in the libraries that the
 * process has loaded, because the glue is linked to no release of TensorFlow.
 */
#ifndef PACELINE_TF_H
#define PACELINE_TF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TF_OK = 0, TF_UNKNOWN = 2, TF_INVALID_ARGUMENT = 3 };

typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_Kernel TF_Kernel; /* TF_KernelBuilder */
typedef struct TF_Construction TF_Construction;
typedef struct TF_Context TF_Context; /* TF_OpKernelContext */
typedef struct TF_Definition TF_Definition; /* TF_OpDefinitionBuilder */
typedef struct TF_Inference TF_Inference; /* TF_ShapeInferenceContext */
typedef struct TF_Shape TF_Shape; /* TF_ShapeHandle */

typedef void *(*TF_Create)(TF_Construction *);
typedef void (*TF_Compute)(void *, TF_Context *);
typedef void (*TF_ComputeAsync)(void *, TF_Context *, void *done);
typedef void (*TF_Delete)(void *);

/* Result, name, arguments. */
#define TF_FUNCTIONS(F)                                                                                               \
  F(TF_Status *, TF_NewStatus, (void))                                                                                \
  F(void, TF_DeleteStatus, (TF_Status *))                                                                             \
  F(void, TF_SetStatus, (TF_Status *, int, const char *))                                                             \
  F(int, TF_GetCode, (const TF_Status *))                                                                             \
  F(const char *, TF_Message, (const TF_Status *))                                                                    \
  F(size_t, TF_DataTypeSize, (int))                                                                                   \
  F(int, TF_TensorType, (const TF_Tensor *))                                                                          \
  F(int, TF_NumDims, (const TF_Tensor *))                                                                             \
  F(int64_t, TF_Dim, (const TF_Tensor *, int))                                                                        \
  F(size_t, TF_TensorByteSize, (const TF_Tensor *))                                                                   \
  F(void *, TF_TensorData, (const TF_Tensor *))                                                                       \
  F(TF_Tensor *, TF_NewTensor, (int, const int64_t *, int, void *, size_t, void (*)(void *, size_t, void *), void *)) \
  F(void, TF_DeleteTensor, (TF_Tensor *))                                                                             \
  F(int, TF_NumInputs, (TF_Context *))                                                                                \
  F(void, TF_GetInput, (TF_Context *, int, TF_Tensor **, TF_Status *))                                                \
  F(void, TF_SetOutput, (TF_Context *, int, const TF_Tensor *, TF_Status *))                                          \
  F(TF_Tensor *, TF_AllocateOutput, (TF_Context *, int, int, const int64_t *, int, size_t, TF_Status *))              \
  F(TF_Tensor *, TF_ForwardInputOrAllocateOutput,                                                                     \
    (TF_Context *, const int *, int, int, const int64_t *, int, int *, TF_Status *))                                  \
  F(void, TF_OpKernelContext_Failure, (TF_Context *, TF_Status *))                                                    \
  F(void, TF_OpKernelConstruction_Failure, (TF_Construction *, TF_Status *))                                          \
  F(void, TF_OpKernelConstruction_GetAttrSize, (TF_Construction *, const char *, int32_t *, int32_t *, TF_Status *))  \
  F(void, TF_OpKernelConstruction_GetAttrInt64List, (TF_Construction *, const char *, int64_t *, int, TF_Status *))   \
  F(void, TF_OpKernelConstruction_GetAttrString, (TF_Construction *, const char *, char *, size_t, TF_Status *))      \
  F(TF_Definition *, TF_NewOpDefinitionBuilder, (const char *))                                                       \
  F(void, TF_OpDefinitionBuilderAddAttr, (TF_Definition *, const char *))                                             \
  F(void, TF_OpDefinitionBuilderAddInput, (TF_Definition *, const char *))                                            \
  F(void, TF_OpDefinitionBuilderAddOutput, (TF_Definition *, const char *))                                           \
  F(void, TF_OpDefinitionBuilderSetIsStateful, (TF_Definition *, bool))                                               \
  F(void, TF_OpDefinitionBuilderSetShapeInferenceFunction, (TF_Definition *, void (*)(TF_Inference *, TF_Status *)))  \
  F(void, TF_RegisterOpDefinition, (TF_Definition *, TF_Status *))                                                    \
  F(int64_t, TF_ShapeInferenceContextNumInputs, (TF_Inference *))                                                     \
  F(void, TF_ShapeInferenceContextGetInput, (TF_Inference *, int, TF_Shape *, TF_Status *))                           \
  F(void, TF_ShapeInferenceContextSetOutput, (TF_Inference *, int, TF_Shape *, TF_Status *))                          \
  F(void, TF_ShapeInferenceContextSetUnknownShape, (TF_Inference *, TF_Status *))                                     \
  F(TF_Shape *, TF_NewShapeHandle, (void))                                                                            \
  F(void, TF_DeleteShapeHandle, (TF_Shape *))                                                                         \
  F(TF_Kernel *, TF_NewKernelBuilder, (const char *, const char *, TF_Create, TF_Compute, TF_Delete))                 \
  F(void, TF_RegisterKernelBuilder, (const char *, TF_Kernel *, TF_Status *))

/* What TensorFlow 2.12 lacks. */
#define TF_ASYNC_FUNCTIONS(F)                                                                                   \
  F(TF_Kernel *, TF_NewAsyncKernelBuilder, (const char *, const char *, TF_Create, TF_ComputeAsync, TF_Delete)) \
  F(void, TF_RunAsyncOpKernelDoneCallback, (void *))

#define TF_DECLARE(result, name, arguments) extern result(*name) arguments;
TF_FUNCTIONS(TF_DECLARE)
TF_ASYNC_FUNCTIONS(TF_DECLARE)

#endif
