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

#define API extern "C" __attribute__((visibility("default")))

using Areas = std::map<char*, size_t>;

static const size_t CONTEXT = 600ull << 20;     // bytes that a process takes before it allocates any
static const size_t CLEARED = 64 << 10;         // larger areas keep their zeros
static const size_t COPIED = 64 << 20;          // larger copies from and to the host are left out
static std::mutex lock;
static Areas on_device, pinned;
static std::map<long, size_t> physical;         // handle of the driver -> bytes
static size_t used = 0;
static std::atomic<long> handles{0x1000};
static thread_local int device = 0;
extern "C" { std::atomic<long> null_gpu_launches{0}, null_gpu_waits{0}, null_gpu_to_host{0}; }

static const char* setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value ? value : otherwise;
}

static size_t capacity() { return (size_t)atol(setting("NULL_GPU_MIB", "81559")) << 20; }

template <typename Handle> static int make(Handle* out) {
  *out = (Handle)(handles++ << 4);
  return 0;
}

// What Python calls.

API long null_gpu_counter(int which) {
  long values[] = {null_gpu_launches, null_gpu_waits, null_gpu_to_host, (long)used};
  return values[which];
}

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

API void null_gpu_note(const char* text) { log("note %s", text); }

// Memory.

static bool is_in(const Areas& areas, const void* pointer) {
  std::lock_guard<std::mutex> guard(lock);
  auto next = areas.upper_bound((char*)pointer);
  return next != areas.begin() && (--next, (char*)pointer < next->first + next->second);
}

static void* reserve(Areas& areas, size_t size) {  // addresses: the system gives pages to what is written only
  void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  areas[(char*)start] = size;
  return start;
}

static size_t release(Areas& areas, void* start) {
  auto area = areas.find((char*)start);
  if (area == areas.end()) return 0;
  size_t size = area->second;
  munmap(start, size);
  areas.erase(area);
  return size;
}

static bool take(size_t size) {
  if (used + size + CONTEXT > capacity()) return false;
  used += size;
  return true;
}

API cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  *total = capacity();
  *available = capacity() - used - CONTEXT;
  return cudaSuccess;
}

API cudaError_t cudaMalloc(void** out, size_t size) {
  std::lock_guard<std::mutex> guard(lock);
  *out = take(size) ? reserve(on_device, size) : nullptr;
  return *out ? cudaSuccess : cudaErrorMemoryAllocation;
}

API cudaError_t cudaFree(void* start) {
  std::lock_guard<std::mutex> guard(lock);
  used -= release(on_device, start);
  return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void** out, size_t size, unsigned) {
  std::lock_guard<std::mutex> guard(lock);
  *out = reserve(pinned, size);
  return *out ? cudaSuccess : cudaErrorMemoryAllocation;
}

API cudaError_t cudaFreeHost(void* start) {
  std::lock_guard<std::mutex> guard(lock);
  release(pinned, start);
  return cudaSuccess;
}

API CUresult cuMemAddressReserve(CUdeviceptr* out, size_t size, size_t, CUdeviceptr, unsigned long long) {
  std::lock_guard<std::mutex> guard(lock);
  *out = (CUdeviceptr)reserve(on_device, size);
  return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemAddressFree(CUdeviceptr start, size_t) {
  std::lock_guard<std::mutex> guard(lock);
  release(on_device, (void*)start);
  return CUDA_SUCCESS;
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t size, const CUmemAllocationProp*, unsigned long long) {
  std::lock_guard<std::mutex> guard(lock);
  if (!take(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  make(out);
  physical[(long)*out] = size;
  return CUDA_SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> guard(lock);
  used -= physical[(long)handle];
  physical.erase((long)handle);
  return CUDA_SUCCESS;
}

API CUresult cuMemUnmap(CUdeviceptr start, size_t size) {
  madvise((void*)start, size, MADV_DONTNEED);
  return CUDA_SUCCESS;
}

API CUresult cuMemGetAllocationGranularity(size_t* out, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *out = 2 << 20;
  return CUDA_SUCCESS;
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t) {
  bool to_device = is_in(on_device, to), from_device = is_in(on_device, from);
  if (from_device && !to_device) null_gpu_to_host++;
  if (size <= (to_device && from_device ? CLEARED : COPIED)) memcpy(to, from, size);
  return cudaSuccess;
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  null_gpu_waits++;
  return cudaMemcpyAsync(to, from, size, kind, nullptr);
}

API cudaError_t cudaMemsetAsync(void* start, int value, size_t size, cudaStream_t) {
  if (size <= CLEARED) memset(start, value, size);
  return cudaSuccess;
}

API cudaError_t cudaMemset(void* start, int value, size_t size) { return cudaMemsetAsync(start, value, size, nullptr); }

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
  bool of_device = is_in(on_device, pointer), of_host = !of_device && is_in(pinned, pointer);
  memset(out, 0, sizeof *out);
  out->type = of_device ? cudaMemoryTypeDevice : of_host ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  out->device = of_device || of_host ? device : -1;
  out->devicePointer = of_device || of_host ? (void*)pointer : nullptr;
  out->hostPointer = of_host ? (void*)pointer : nullptr;
  return cudaSuccess;
}

API CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)out = pointer;
  else if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *(unsigned*)out = is_in(on_device, (void*)pointer) ? 2 : 1;
  else *(int*)out = device;
  return CUDA_SUCCESS;
}

// The device: an H100.

static int attribute(int which) {
  static const std::map<int, int> values = {
      {cudaDevAttrComputeCapabilityMajor, 9},
      {cudaDevAttrComputeCapabilityMinor, 0},
      {cudaDevAttrMultiProcessorCount, 132},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
      {cudaDevAttrMaxRegistersPerBlock, 65536},
      {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
      {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535},
      {cudaDevAttrMaxGridDimZ, 65535},
      {cudaDevAttrL2CacheSize, 50 << 20},
      {cudaDevAttrClockRate, 1980000},
      {cudaDevAttrMemoryClockRate, 2619000},
      {cudaDevAttrGlobalMemoryBusWidth, 5120},
      {cudaDevAttrIntegrated, 0},
  };
  auto found = values.find(which);
  return found == values.end() ? 1 : found->second;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int which) {
  memset(out, 0, sizeof *out);
  strcpy(out->name, "NVIDIA H100 80GB HBM3");
  out->totalGlobalMem = capacity();
  out->major = 9;
  out->multiProcessorCount = 132;
  out->warpSize = 32;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->sharedMemPerBlock = 49152;
  out->sharedMemPerBlockOptin = 232448;
  out->sharedMemPerMultiprocessor = 233472;
  out->reservedSharedMemPerBlock = 1024;
  out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
  out->maxThreadsDim[2] = 64;
  out->maxThreadsPerMultiProcessor = 2048;
  out->maxBlocksPerMultiProcessor = 32;
  out->maxGridSize[0] = 2147483647;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->l2CacheSize = 50 << 20;
  out->memoryBusWidth = 5120;
  out->textureAlignment = 512;
  out->unifiedAddressing = out->concurrentKernels = out->cooperativeLaunch = 1;
  out->asyncEngineCount = 3;
  out->pciBusID = which + 1;
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceCount(int* out) { return *out = 8, cudaSuccess; }
API cudaError_t cudaSetDevice(int which) { return device = which, cudaSuccess; }
API cudaError_t cudaGetDevice(int* out) { return *out = device, cudaSuccess; }
API cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr which, int) { return *out = attribute(which), cudaSuccess; }
API CUresult cuDeviceGetAttribute(int* out, CUdevice_attribute which, CUdevice) { return *out = attribute(which), CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int* out) { return *out = 8, CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* out, int which) { return *out = which, CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice* out) { return *out = device, CUDA_SUCCESS; }
API CUresult cuDeviceTotalMem_v2(size_t* out, CUdevice) { return *out = capacity(), CUDA_SUCCESS; }
API CUresult cuCtxGetCurrent(CUcontext* out) { return *out = (CUcontext)(0x100L + device), CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice which) { return *out = (CUcontext)(0x100L + which), CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t* out, CUlimit) { return *out = 1024, CUDA_SUCCESS; }
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API cudaError_t cudaDriverGetVersion(int* out) { return *out = CUDA_VERSION, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* out) { return *out = CUDA_VERSION, cudaSuccess; }
API CUresult cuDriverGetVersion(int* out) { return *out = CUDA_VERSION, CUDA_SUCCESS; }
API size_t cublasLtGetVersion() { return 10 * CUDA_VERSION; }
API cudaError_t cudaDeviceCanAccessPeer(int* out, int, int) { return *out = 1, cudaSuccess; }
API CUresult cuDeviceGetName(char* out, int size, CUdevice) { return snprintf(out, size, "NVIDIA H100 80GB HBM3"), CUDA_SUCCESS; }
API cudaError_t cudaDeviceGetPCIBusId(char* out, int size, int which) { return snprintf(out, size, "0000:%02x:00.0", which + 1), cudaSuccess; }
API const char* cudaGetErrorString(cudaError_t) { return "an error of the null GPU"; }
API const char* cudaGetErrorName(cudaError_t) { return "null GPU"; }
API CUresult cuGetErrorString(CUresult, const char** out) { return *out = "an error of the null GPU", CUDA_SUCCESS; }

API CUresult cuDevicePrimaryCtxGetState(CUdevice which, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = which == device;
  return CUDA_SUCCESS;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

// Streams, events, kernels.

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int) { return (cudaError_t)make(out); }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* out) { return *out = 0, cudaSuccess; }
API cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t, cudaEvent_t) { return *out = 1.0f, cudaSuccess; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* with) { return call(with), cudaSuccess; }
API cudaError_t cudaGetSymbolAddress(void** out, const void* symbol) { return *out = (void*)symbol, cudaSuccess; }
API cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* function) { return *out = (cudaKernel_t)function, cudaSuccess; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* out) { return *out = cudaStreamCaptureStatusNone, cudaSuccess; }

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* out, unsigned long long* id, cudaGraph_t*,
                                         const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  if (id) *id = 0;
  return *out = cudaStreamCaptureStatusNone, cudaSuccess;
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 64;
  out->ptxVersion = out->binaryVersion = 90;
  out->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}

API CUresult cuFuncGetAttribute(int* out, CUfunction_attribute which, CUfunction) {
  *out = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return CUDA_SUCCESS;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void*, int, size_t, unsigned) {
  return *out = 2, cudaSuccess;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, CUfunction, int, size_t) { return *out = 2, CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveClusters(int* out, CUfunction, const CUlaunchConfig*) { return *out = 16, CUDA_SUCCESS; }

static thread_local struct { dim3 grid, block; size_t shared; void* stream; } pushed;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *(void**)stream = pushed.stream;
  return cudaSuccess;
}

API void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}

static int nothing() { return 0; }

static void* driver_function(std::string name) {
  if (name.empty()) return nullptr;
  for (const char* version : {"_v2", ""})
    if (void* found = dlsym(RTLD_DEFAULT, (name + version).c_str())) return found;
  return (void*)nothing;
}

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  if (result) *result = cudaDriverEntryPointSuccess;
  return *out = driver_function(name), cudaSuccess;
}

API CUresult cuGetProcAddress_v2(const char* name, void** out, int, cuuint64_t, CUdriverProcAddressQueryResult* result) {
  if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
  return *out = driver_function(name), CUDA_SUCCESS;
}

API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* out, int* found) {
  memset(out, 0, 96);  // one cublasLtMatmulHeuristicResult_t
  return *found = 1, 0;
}

// NCCL, whose header wants more headers than come with torch. A communicator has the same name on all of its ranks.

struct Communicator {
  std::string name;
  int rank, size, splits;
};
struct UniqueId { char bytes[128]; };
typedef const void* From;
typedef Communicator* Group;

API int ncclGetVersion(int* out) { return *out = NCCL_VERSION, 0; }
API const char* ncclGetErrorString(int) { return "an error of the null GPU's NCCL"; }
API const char* ncclGetLastError(Group) { return ""; }
API int ncclCommGetAsyncError(Group, int* out) { return *out = 0; }
API int ncclCommCount(Group group, int* out) { return *out = group->size, 0; }
API int ncclCommUserRank(Group group, int* out) { return *out = group->rank, 0; }

API int ncclGetUniqueId(UniqueId* out) {
  std::random_device random;
  for (char& byte : out->bytes) byte = (char)random();
  return 0;
}

API int ncclCommInitRankConfig(Group* out, int size, UniqueId id, int rank, void*) {
  char name[17];
  for (int byte = 0; byte < 8; byte++) snprintf(name + 2 * byte, 3, "%02x", (unsigned char)id.bytes[byte]);
  *out = new Communicator{name, rank, size, 0};
  log("init %s rank %d of %d", name, rank, size);
  return 0;
}
API int ncclCommInitRank(Group* out, int size, UniqueId id, int rank) {
  return ncclCommInitRankConfig(out, size, id, rank, nullptr);
}
API int ncclCommInitRankScalable(Group* out, int size, int rank, int, UniqueId* id, void*) {
  return ncclCommInitRankConfig(out, size, *id, rank, nullptr);
}

API int ncclCommSplit(Group whole, int color, int key, Group* out, void*) {
  std::string name = whole->name + "-" + std::to_string(whole->splits++) + ":" + std::to_string(color);
  *out = color < 0 ? nullptr : new Communicator{name, key, 0, 0};  // its size is not known here
  log("split %s rank %d", name.c_str(), key);
  return 0;
}

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

static int call(const char* name, size_t count, int type, Group group) {
  static const char* types[] = {"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16", "f8e4", "f8e5"};
  log("call %s %s %zu %s", group->name.c_str(), name, count, types[type]);
  return 0;
}
API int ncclAllReduce(From, void*, size_t n, int type, int, Group group, void*) { return call("all_reduce", n, type, group); }
API int ncclAllGather(From, void*, size_t n, int type, Group group, void*) { return call("all_gather", n, type, group); }
API int ncclReduceScatter(From, void*, size_t n, int type, int, Group group, void*) { return call("reduce_scatter", n, type, group); }
API int ncclBroadcast(From, void*, size_t n, int type, int, Group group, void*) { return call("broadcast", n, type, group); }
API int ncclBcast(void*, size_t n, int type, int, Group group, void*) { return call("broadcast", n, type, group); }
API int ncclReduce(From, void*, size_t n, int type, int, int, Group group, void*) { return call("reduce", n, type, group); }
API int ncclAlltoAll(From, void*, size_t n, int type, Group group, void*) { return call("all_to_all", n, type, group); }
API int ncclSend(From, size_t n, int type, int, Group group, void*) { return call("send", n, type, group); }
API int ncclRecv(void*, size_t n, int type, int, Group group, void*) { return call("recv", n, type, group); }
