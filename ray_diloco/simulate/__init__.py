"""The ports of `rounds/` on a virtual clock: the same run loop without processes or waiting."""
