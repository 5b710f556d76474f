// One provider of libfabric, as package fabric uses it: an endpoint, its messages, reads and completions. Functions
// return 0 or a negative error number of libfabric, if they do not say otherwise.
#ifndef PACELINE_FABRIC_PROVIDER_H
#define PACELINE_FABRIC_PROVIDER_H

#include "libfabric.h"

#pragma GCC visibility push(hidden)

// pf_load loads libfabric, once. It returns NULL or what is wrong.
const char *pf_load(void);
const char *pf_strerror(int error);

// pf_find gives the offers, each the next of the one before, of reliable datagrams with remote reads: of a provider, or
// of all where that is NULL. pf_forget releases the list.
int pf_find(const char *provider, struct lf_info **list);
void pf_forget(struct lf_info *list);

// An operation in flight. The provider uses the first part.
struct pf_op {
  void *internal[8];
  uint32_t number;
};

// Slots: messages of slot_bytes each, and their operations.
struct pf_block {
  struct pf_block *next;
  struct pf_op *ops;
  char *memory;
  size_t slot_bytes;
  struct lf_mr *mr; // NULL where none is needed
};

struct pf_device {
  struct lf_info *info;
  struct lf_fabric *fabric;
  struct lf_domain *domain;
  struct lf_cq *cq;
  struct lf_av *av;
  struct lf_ep *ep;
  int fd; // readable when there may be completions; -1 where the provider has none
  struct pf_block *blocks;
};

// pf_open opens an endpoint on the device of an offer, which is copied.
int pf_open(const struct lf_info *info, struct pf_device **device);
// pf_down ends all traffic: when it returns, nothing touches memory any more. Only pf_unregister and pf_shut may
// follow.
void pf_down(struct pf_device *d);
void pf_shut(struct pf_device *d);

int pf_name(struct pf_device *d, void *name, size_t *length);
int pf_peer(struct pf_device *d, const void *name, uint64_t *peer);

// pf_block_open makes slots, whose operations are numbered from first on. They live as long as the device.
int pf_block_open(struct pf_device *d, uint32_t first, int slots, size_t slot_bytes, struct pf_block **block);

int pf_receive(struct pf_device *d, struct pf_block *b, int slot);
int pf_send(struct pf_device *d, struct pf_block *b, int slot, size_t length, uint64_t peer);
// pf_read reads the peer's memory, as the operation of a slot. local is needed where info asks for LF_MR_LOCAL.
int pf_read(struct pf_device *d, struct pf_block *b, int slot, void *to, size_t length, struct lf_mr *local,
            uint64_t peer, uint64_t address, uint64_t key);

// A completion: of which operation, how many bytes were received, or its error number.
struct pf_event {
  uint32_t number, length;
  int32_t error;
};

// pf_next takes completions that are there and returns how many it has put into events.
int pf_next(struct pf_device *d, struct pf_event *events, int count);
// pf_idle returns whether one may wait for fd: without it there may be completions that fd does not show.
int pf_idle(struct pf_device *d);

// pf_register makes memory known for reads from it and into it. The key is what is asked for, unless the provider
// chooses.
int pf_register(struct pf_device *d, void *memory, size_t length, uint64_t key, struct lf_mr **mr);
void pf_unregister(struct lf_mr *mr);

#pragma GCC visibility pop

#endif
