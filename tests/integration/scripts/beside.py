NAME = "beside"
