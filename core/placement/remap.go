package placement

// Block is what a remap moves as a whole: one partition, or the first partitions of all tensors of a name, which share a
// home server.
type Block struct {
	Bytes  uint64
	Server int // that has it, or Free if that has gone
}

// Situation is what a policy knows when it decides about all keys of a job.
type Situation struct {
	Blocks   []Block
	Weights  []float64 // of the servers, as for Policy.Over
	Profiles Profiles  // of the servers
	Initial  int       // number of servers that the round began with
	Seed     uint64    // of random choices: another one for each decision
}

// Verdict is what the profiles of the servers ask for.
type Verdict struct {
	Remap bool // some servers are so slow that keys should move
	Grow  bool // too few servers are fast: one more is wanted
}

// loads is the bytes of the blocks on each server.
func (s *Situation) loads() []float64 {
	loads := make([]float64, len(s.Weights))
	for _, b := range s.Blocks {
		if b.Server != Free {
			loads[b.Server] += float64(b.Bytes)
		}
	}
	return loads
}

// bytes is those of all blocks.
func (s *Situation) bytes() (sum float64) {
	for _, b := range s.Blocks {
		sum += float64(b.Bytes)
	}
	return sum
}
