/* A CUDA driver without a device: what kvikio looks up at its first transfer, and no more.
 *
 * It knows no device memory (cuPointerGetAttributes answers 3, not initialized), so kvikio takes
 * every pointer for host memory and moves it with POSIX calls. "Device" memory is the heap's.
 * Outside of a test that asks for it, it says that it cannot start.
 */
#include <stdlib.h>
#include <string.h>
#include <stddef.h>
typedef int R; typedef unsigned long long P;
#define OK 0
R cuInit(unsigned f){return getenv("TIERKV_TEST_CUDA")?OK:100;}
R cuDriverGetVersion(int*v){*v=13000;return OK;}
R cuDeviceGetCount(int*n){*n=1;return OK;}
R cuDeviceGetName(char*s,int n,int d){strncpy(s,"stub",n);return OK;}
R cuDeviceGet(int*d,int i){*d=i;return OK;}
R cuDeviceGetAttribute(int*v,int a,int d){*v=0;return OK;}
R cuDevicePrimaryCtxRetain(void**c,int d){*c=(void*)1;return OK;}
R cuDevicePrimaryCtxRelease_v2(int d){return OK;}
R cuCtxCreate_v4(void**c,unsigned f,int d){*c=(void*)1;return OK;}
R cuCtxDestroy_v2(void*c){return OK;}
R cuCtxPushCurrent_v2(void*c){return OK;}
R cuCtxPopCurrent_v2(void**c){*c=(void*)1;return OK;}
R cuCtxSetCurrent(void*c){return OK;}
R cuCtxGetCurrent(void**c){*c=(void*)1;return OK;}
R cuCtxGetDevice(int*d){*d=0;return OK;}
R cuMemHostAlloc(void**p,size_t n,unsigned f){return posix_memalign(p,4096,n)?2:OK;}
R cuMemFreeHost(void*p){free(p);return OK;}
R cuMemHostRegister_v2(void*p,size_t n,unsigned f){return OK;}
R cuMemHostUnregister(void*p){return OK;}
R cuMemAlloc_v2(P*p,size_t n){void*q;if(posix_memalign(&q,4096,n))return 2;*p=(P)q;return OK;}
R cuMemFree_v2(P p){free((void*)p);return OK;}
R cuMemcpyHtoD_v2(P d,const void*s,size_t n){memcpy((void*)d,s,n);return OK;}
R cuMemcpyDtoH_v2(void*d,P s,size_t n){memcpy(d,(void*)s,n);return OK;}
R cuMemcpyHtoDAsync_v2(P d,const void*s,size_t n,void*t){memcpy((void*)d,s,n);return OK;}
R cuMemcpyDtoHAsync_v2(void*d,P s,size_t n,void*t){memcpy(d,(void*)s,n);return OK;}
R cuMemcpyAsync(P d,P s,size_t n,void*t){memmove((void*)d,(void*)s,n);return OK;}
R cuMemcpyBatchAsync_v2(void){return 801;}
R cuPointerGetAttribute(void*v,int a,P p){return 3;}
R cuPointerGetAttributes(unsigned n,int*a,void**v,P p){return 3;}
R cuMemGetAddressRange_v2(P*b,size_t*n,P p){return 3;}
R cuGetErrorName(int e,const char**s){*s="stub";return OK;}
R cuGetErrorString(int e,const char**s){*s="stub";return OK;}
R cuStreamCreate(void**s,unsigned f){*s=(void*)2;return OK;}
R cuStreamSynchronize(void*s){return OK;}
R cuStreamDestroy_v2(void*s){return OK;}
R cuEventCreate(void**e,unsigned f){*e=(void*)3;return OK;}
R cuEventDestroy_v2(void*e){return OK;}
R cuEventRecord(void*e,void*s){return OK;}
R cuEventQuery(void*e){return OK;}
R cuEventSynchronize(void*e){return OK;}
R cuLaunchHostFunc(void*s,void(*f)(void*),void*u){f(u);return OK;}
