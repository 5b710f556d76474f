package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/cmd/paceline/launch"
)

func envCommand() *cobra.Command {
	var horovod bool
	c := &cobra.Command{
		Use:   "env --horovod",
		Short: "Print the variables with which other launchers' processes find Paceline",
		Long: `Print the variables with which other launchers' processes find Paceline, as commands of a shell.

--horovod lets 'import horovod' find Paceline in every Python that the shell starts from then on, as 'paceline run
--horovod' does for its own job. mpirun hands variables on with -x PYTHONPATH (Open MPI) or -genvlist (MPICH).`,
		Example: `  eval "$(paceline env --horovod)"
  torchrun --nproc-per-node 2 train_with_horovod.py
  srun --ntasks 4 python train_with_horovod.py
  mpirun -np 4 -x PYTHONPATH python train_with_horovod.py`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if !horovod {
				return errors.New("say --horovod, for scripts that import horovod")
			}
			dir, err := shimDir(nil)
			if err != nil {
				return err
			}
			fmt.Fprintf(c.OutOrStdout(), "export PYTHONPATH=%s${PYTHONPATH:+:$PYTHONPATH}\n", launch.Quote(dir))
			return nil
		},
	}
	c.Flags().BoolVar(&horovod, "horovod", false, "let 'import horovod' find Paceline")
	return c
}
