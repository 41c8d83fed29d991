// A GPU that computes nothing. Preloaded, this library stands in for the CUDA runtime, the driver, cuBLAS and NCCL under
// a CUDA build of torch. Memory is reserved and counted, small copies are real; kernels and collectives do nothing.
// build.py generates every function of torch's that is not defined here: it does nothing and returns success.
//
// Environment: NULL_GPU_LOG = where each rank writes its NCCL calls, to this name + "." + rank; NULL_GPU_MIB = memory of
// a device; NULL_GPU_TOGETHER = a folder: destroying a communicator waits for all of its ranks there, as NCCL does.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>

// Functions: name, parameters and body, after which they return success.
#define API extern "C" __attribute__((visibility("default")))
#define RUNTIME(name, parameters, ...) API cudaError_t name parameters { __VA_ARGS__; return cudaSuccess; }
#define DRIVER(name, parameters, ...) API CUresult name parameters { __VA_ARGS__; return CUDA_SUCCESS; }
#define NCCL(name, parameters, ...) API int name parameters { __VA_ARGS__; return 0; }

static const long CONTEXT = 600l << 20;   // bytes that a process takes before it allocates any
static const size_t CLEARED = 64 << 10;   // larger areas keep their zeros
static const size_t COPIED = 64 << 20;    // larger copies from and to the host are left out
static const char* NAME = "NVIDIA H100 80GB HBM3";
static thread_local int device = 0;
static std::atomic<long> used{0};
extern "C" { std::atomic<long> null_gpu_launches{0}, null_gpu_waits{0}, null_gpu_to_host{0}; }

static const char* setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value ? value : otherwise;
}

static long capacity() { return atol(setting("NULL_GPU_MIB", "81559")) << 20; }

static void log(const char* format, ...) {
  static FILE* file = [] {
    const char* name = getenv("NULL_GPU_LOG");
    FILE* opened = name ? fopen((std::string(name) + "." + setting("RANK", "0")).c_str(), "a") : nullptr;
    if (opened) setvbuf(opened, nullptr, _IOLBF, 0);
    return opened;
  }();
  if (!file) return;
  char line[512];
  va_list values;
  va_start(values, format);
  vsnprintf(line, sizeof line, format, values);
  va_end(values);
  fprintf(file, "%s\n", line);  // one call: threads do not mix
}

// What Python calls.

API void null_gpu_note(const char* text) { log("note %s", text); }
API long null_gpu_counter(int which) { return which == 0 ? null_gpu_launches : which == 1 ? null_gpu_waits : null_gpu_to_host; }

// Memory.

struct Areas {
  std::map<char*, size_t> sizes;
  std::mutex lock;

  void* add(size_t size) {  // addresses: the system gives pages to what is written only
    void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return nullptr;
    std::lock_guard<std::mutex> guard(lock);
    sizes[(char*)start] = size;
    return start;
  }

  size_t remove(void* start) {
    std::lock_guard<std::mutex> guard(lock);
    auto area = sizes.find((char*)start);
    if (area == sizes.end()) return 0;
    size_t size = area->second;
    sizes.erase(area);
    munmap(start, size);
    return size;
  }

  bool has(const void* pointer) {
    std::lock_guard<std::mutex> guard(lock);
    auto next = sizes.upper_bound((char*)pointer);
    return next != sizes.begin() && (--next, (char*)pointer < next->first + next->second);
  }
};
static Areas on_device, pinned;

static bool take(long size) {
  bool fits = (used += size) + CONTEXT <= capacity();
  if (!fits) used -= size;
  return fits;
}

RUNTIME(cudaMemGetInfo, (size_t* available, size_t* total), *total = capacity(); *available = *total - used - CONTEXT)
RUNTIME(cudaMalloc, (void** out, size_t size),
        if (!(*out = take(size) ? on_device.add(size) : nullptr)) return cudaErrorMemoryAllocation)
RUNTIME(cudaFree, (void* start), used -= on_device.remove(start))
RUNTIME(cudaHostAlloc, (void** out, size_t size, unsigned), if (!(*out = pinned.add(size))) return cudaErrorMemoryAllocation)
RUNTIME(cudaFreeHost, (void* start), pinned.remove(start))
DRIVER(cuMemAddressReserve, (CUdeviceptr* out, size_t size, size_t, CUdeviceptr, unsigned long long),
       if (!(*out = (CUdeviceptr)on_device.add(size))) return CUDA_ERROR_OUT_OF_MEMORY)
DRIVER(cuMemAddressFree, (CUdeviceptr start, size_t), on_device.remove((void*)start))
DRIVER(cuMemCreate, (CUmemGenericAllocationHandle* out, size_t size, const CUmemAllocationProp*, unsigned long long),
       if (!take(size)) return CUDA_ERROR_OUT_OF_MEMORY; *out = size)  // the handle is the size
DRIVER(cuMemRelease, (CUmemGenericAllocationHandle handle), used -= handle)
DRIVER(cuMemExportToShareableHandle, (void* out, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long),
       *(int*)out = memfd_create("null GPU", 0))  // symmetric memory sends it to the other processes
DRIVER(cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle* out, void*, CUmemAllocationHandleType), *out = 0)
DRIVER(cuMemUnmap, (CUdeviceptr start, size_t size), madvise((void*)start, size, MADV_DONTNEED))
DRIVER(cuMemGetAllocationGranularity, (size_t* out, const CUmemAllocationProp*, CUmemAllocationGranularity_flags),
       *out = 2 << 20)

RUNTIME(cudaMemcpyAsync, (void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t),
        bool to_device = on_device.has(to); bool from_device = on_device.has(from);
        if (from_device && !to_device) null_gpu_to_host++;
        if (size <= (to_device && from_device ? CLEARED : COPIED)) memcpy(to, from, size))
RUNTIME(cudaMemcpy, (void* to, const void* from, size_t size, cudaMemcpyKind kind),
        null_gpu_waits++; cudaMemcpyAsync(to, from, size, kind, nullptr))
RUNTIME(cudaMemsetAsync, (void* start, int value, size_t size, cudaStream_t), if (size <= CLEARED) memset(start, value, size))
RUNTIME(cudaMemset, (void* start, int value, size_t size), cudaMemsetAsync(start, value, size, nullptr))

RUNTIME(cudaPointerGetAttributes, (cudaPointerAttributes* out, const void* pointer),
        bool of_device = on_device.has(pointer); bool of_host = pinned.has(pointer);
        memset(out, 0, sizeof *out);
        out->type = of_device ? cudaMemoryTypeDevice : of_host ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
        out->device = of_device || of_host ? device : -1;
        out->devicePointer = of_device || of_host ? (void*)pointer : nullptr;
        out->hostPointer = of_host ? (void*)pointer : nullptr)
DRIVER(cuPointerGetAttribute, (void* out, CUpointer_attribute which, CUdeviceptr pointer),
       if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)out = pointer;
       else *(int*)out = which == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? 2 - on_device.has((void*)pointer) : device)

// The device: an H100.

static int attribute(int which) {
  static const std::map<int, int> values = {
      {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrComputeCapabilityMinor, 0},
      {cudaDevAttrMultiProcessorCount, 132}, {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrMaxSharedMemoryPerBlock, 49152}, {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472}, {cudaDevAttrMaxRegistersPerBlock, 65536},
      {cudaDevAttrMaxRegistersPerMultiprocessor, 65536}, {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535}, {cudaDevAttrMaxGridDimZ, 65535},
      {cudaDevAttrL2CacheSize, 50 << 20}, {cudaDevAttrClockRate, 1980000},
      {cudaDevAttrMemoryClockRate, 2619000}, {cudaDevAttrGlobalMemoryBusWidth, 5120}, {cudaDevAttrIntegrated, 0},
  };
  auto found = values.find(which);
  return found == values.end() ? 1 : found->second;
}

RUNTIME(cudaGetDeviceProperties, (cudaDeviceProp* out, int which),
        memset(out, 0, sizeof *out); strcpy(out->name, NAME);
        out->totalGlobalMem = capacity(); out->l2CacheSize = 50 << 20; out->memoryBusWidth = 5120;
        out->major = 9; out->multiProcessorCount = 132; out->warpSize = 32; out->pciBusID = which + 1;
        out->regsPerBlock = out->regsPerMultiprocessor = 65536;
        out->sharedMemPerBlock = 49152; out->sharedMemPerBlockOptin = 232448;
        out->sharedMemPerMultiprocessor = 233472; out->reservedSharedMemPerBlock = 1024;
        out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024; out->maxThreadsDim[2] = 64;
        out->maxThreadsPerMultiProcessor = 2048; out->maxBlocksPerMultiProcessor = 32;
        out->maxGridSize[0] = 2147483647; out->maxGridSize[1] = out->maxGridSize[2] = 65535;
        out->textureAlignment = 512; out->asyncEngineCount = 3;
        out->unifiedAddressing = out->concurrentKernels = out->cooperativeLaunch = 1)
RUNTIME(cudaGetDeviceCount, (int* out), *out = 8)
RUNTIME(cudaSetDevice, (int which), device = which)
RUNTIME(cudaGetDevice, (int* out), *out = device)
RUNTIME(cudaDeviceGetAttribute, (int* out, cudaDeviceAttr which, int), *out = attribute(which))
RUNTIME(cudaDriverGetVersion, (int* out), *out = CUDA_VERSION)
RUNTIME(cudaRuntimeGetVersion, (int* out), *out = CUDA_VERSION)
RUNTIME(cudaDeviceCanAccessPeer, (int* out, int, int), *out = 1)
RUNTIME(cudaDeviceGetPCIBusId, (char* out, int size, int which), snprintf(out, size, "0000:%02x:00.0", which + 1))
RUNTIME(cudaDeviceGetStreamPriorityRange, (int* least, int* greatest), if (least) *least = 0; if (greatest) *greatest = -5)
DRIVER(cuDeviceGetAttribute, (int* out, CUdevice_attribute which, CUdevice), *out = attribute(which))
DRIVER(cuDeviceGetCount, (int* out), *out = 8)
DRIVER(cuDeviceGet, (CUdevice* out, int which), *out = which)
DRIVER(cuDeviceGetName, (char* out, int size, CUdevice), snprintf(out, size, "%s", NAME))
DRIVER(cuDeviceTotalMem_v2, (size_t* out, CUdevice), *out = capacity())
DRIVER(cuDriverGetVersion, (int* out), *out = CUDA_VERSION)
DRIVER(cuCtxGetDevice, (CUdevice* out), *out = device)
DRIVER(cuCtxGetCurrent, (CUcontext* out), *out = (CUcontext)(0x100L + device))
DRIVER(cuCtxGetLimit, (size_t* out, CUlimit), *out = 1024)
DRIVER(cuDevicePrimaryCtxRetain, (CUcontext* out, CUdevice which), *out = (CUcontext)(0x100L + which))
DRIVER(cuDevicePrimaryCtxGetState, (CUdevice which, unsigned* flags, int* active),
       if (flags) *flags = 0; *active = which == device)
DRIVER(cuGetErrorString, (CUresult, const char** out), *out = "an error of the null GPU")
API const char* cudaGetErrorString(cudaError_t) { return "an error of the null GPU"; }
API const char* cudaGetErrorName(cudaError_t) { return "null GPU"; }
API size_t cublasLtGetVersion() { return 10 * CUDA_VERSION; }

// Streams, events, kernels.

RUNTIME(cudaStreamGetPriority, (cudaStream_t, int* out), *out = 0)
RUNTIME(cudaEventElapsedTime, (float* out, cudaEvent_t, cudaEvent_t), *out = 1.0f)
RUNTIME(cudaLaunchHostFunc, (cudaStream_t, cudaHostFn_t call, void* with), call(with))
RUNTIME(cudaGetSymbolAddress, (void** out, const void* symbol), *out = (void*)symbol)
RUNTIME(__cudaGetKernel, (cudaKernel_t* out, const void* function), *out = (cudaKernel_t)function)
RUNTIME(cudaStreamIsCapturing, (cudaStream_t, cudaStreamCaptureStatus* out), *out = cudaStreamCaptureStatusNone)
DRIVER(cuStreamIsCapturing, (CUstream, CUstreamCaptureStatus* out), *out = CU_STREAM_CAPTURE_STATUS_NONE)
RUNTIME(cudaStreamGetCaptureInfo, (cudaStream_t, cudaStreamCaptureStatus* out, unsigned long long* id, cudaGraph_t*,
                                   const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*),
        if (id) *id = 0; *out = cudaStreamCaptureStatusNone)
RUNTIME(cudaFuncGetAttributes, (cudaFuncAttributes* out, const void*),
        memset(out, 0, sizeof *out); out->maxThreadsPerBlock = 1024; out->numRegs = 64;
        out->ptxVersion = out->binaryVersion = 90; out->maxDynamicSharedSizeBytes = 232448)
DRIVER(cuFuncGetAttribute, (int* out, CUfunction_attribute which, CUfunction),
       *out = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0)
RUNTIME(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, (int* out, const void*, int, size_t, unsigned), *out = 2)
DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int* out, CUfunction, int, size_t), *out = 2)
DRIVER(cuOccupancyMaxActiveClusters, (int* out, CUfunction, const CUlaunchConfig*), *out = 16)
NCCL(cublasLtMatmulAlgoGetHeuristic, (void*, void*, void*, void*, void*, void*, void*, int, void* out, int* found),
     memset(out, 0, 96); *found = 1)  // one cublasLtMatmulHeuristicResult_t

static int nothing() { return 0; }

static void* driver_function(std::string name) {
  if (name.empty()) return nullptr;
  for (const char* version : {"_v2", ""})
    if (void* found = dlsym(RTLD_DEFAULT, (name + version).c_str())) return found;
  return (void*)nothing;
}

RUNTIME(cudaGetDriverEntryPointByVersion,
        (const char* name, void** out, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result),
        if (result) *result = cudaDriverEntryPointSuccess; *out = driver_function(name))
DRIVER(cuGetProcAddress_v2, (const char* name, void** out, int, cuuint64_t, CUdriverProcAddressQueryResult* result),
       if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS; *out = driver_function(name))

// NCCL, whose header wants more headers than come with torch. A communicator has the same name on all of its ranks.

struct Communicator {
  std::string name;
  int rank, size, splits;
};
struct UniqueId { char bytes[128]; };
typedef const void* From;
typedef Communicator* Group;

NCCL(ncclGetVersion, (int* out), *out = NCCL_VERSION)
API const char* ncclGetErrorString(int) { return "an error of the null GPU's NCCL"; }
API const char* ncclGetLastError(Group) { return ""; }
NCCL(ncclCommGetAsyncError, (Group, int* out), *out = 0)
NCCL(ncclCommCount, (Group group, int* out), *out = group->size)
NCCL(ncclCommUserRank, (Group group, int* out), *out = group->rank)
NCCL(ncclGetUniqueId, (UniqueId* out), std::random_device random; for (char& byte : out->bytes) byte = (char)random())

API int ncclCommInitRankConfig(Group* out, int size, UniqueId id, int rank, void*) {
  char name[17];
  for (int byte = 0; byte < 8; byte++) snprintf(name + 2 * byte, 3, "%02x", (unsigned char)id.bytes[byte]);
  *out = new Communicator{name, rank, size, 0};
  log("init %s rank %d of %d", name, rank, size);
  return 0;
}
NCCL(ncclCommInitRankScalable, (Group* out, int size, int rank, int, UniqueId* id, void*),
     ncclCommInitRankConfig(out, size, *id, rank, nullptr))

static int ranks_of(int color, const std::string& split, Group whole) {  // each rank of the whole leaves its color
  const char* folder = getenv("NULL_GPU_TOGETHER");
  if (!folder) return 0;
  std::string file = std::string(folder) + "/" + split + ".";
  symlink(std::to_string(color).c_str(), (file + std::to_string(whole->rank)).c_str());
  int count = 0;
  for (int rank = 0; rank < whole->size; rank++) {
    char text[12] = {};
    while (readlink((file + std::to_string(rank)).c_str(), text, sizeof text - 1) < 0) usleep(5000);
    count += atoi(text) == color;
  }
  return count;
}
NCCL(ncclCommSplit, (Group whole, int color, int key, Group* out, void*),
     std::string split = whole->name + "-" + std::to_string(whole->splits++);
     std::string name = split + ":" + std::to_string(color);
     int size = ranks_of(color, split, whole);
     *out = color < 0 ? nullptr : new Communicator{name, key, size, 0};
     log("split %s rank %d", name.c_str(), key))

API int ncclCommFinalize(Group group) {
  if (const char* folder = getenv("NULL_GPU_TOGETHER")) {
    std::string file = std::string(folder) + "/" + group->name + ".";
    fclose(fopen((file + std::to_string(group->rank)).c_str(), "w"));
    for (int rank = 0; rank < group->size; rank++)
      while (access((file + std::to_string(rank)).c_str(), F_OK)) usleep(50000);
  }
  log("finalize %s", group->name.c_str());
  return 0;
}

static void call(const char* name, size_t count, int type, Group group) {
  static const char* types[] = {"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16", "f8e4", "f8e5"};
  log("call %s %s %zu %s", group->name.c_str(), name, count, types[type]);
}
NCCL(ncclAllReduce, (From, void*, size_t n, int type, int, Group group, void*), call("all_reduce", n, type, group))
NCCL(ncclAllGather, (From, void*, size_t n, int type, Group group, void*), call("all_gather", n, type, group))
NCCL(ncclReduceScatter, (From, void*, size_t n, int type, int, Group group, void*), call("reduce_scatter", n, type, group))
NCCL(ncclBroadcast, (From, void*, size_t n, int type, int, Group group, void*), call("broadcast", n, type, group))
NCCL(ncclBcast, (void*, size_t n, int type, int, Group group, void*), call("broadcast", n, type, group))
NCCL(ncclReduce, (From, void*, size_t n, int type, int, int, Group group, void*), call("reduce", n, type, group))
NCCL(ncclAlltoAll, (From, void*, size_t n, int type, Group group, void*), call("all_to_all", n, type, group))
NCCL(ncclSend, (From, size_t n, int type, int, Group group, void*), call("send", n, type, group))
NCCL(ncclRecv, (void*, size_t n, int type, int, Group group, void*), call("recv", n, type, group))
