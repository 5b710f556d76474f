package main

import "runtime/metrics"

// heap is what this process has taken from Go's heap since its begin, and how often the collector has run.
func heap() map[string]uint64 {
	samples := []metrics.Sample{{Name: "/gc/heap/allocs:objects"}, {Name: "/gc/heap/allocs:bytes"}, {Name: "/gc/cycles/total:gc-cycles"}}
	metrics.Read(samples)
	return map[string]uint64{"objects": samples[0].Value.Uint64(), "bytes": samples[1].Value.Uint64(), "collections": samples[2].Value.Uint64()}
}
